// Phrases: what followed the last tokens of a response, whichever its prompt. A model says much to all prompts alike.
//
// A context is the last 1 to MAX_CONTEXT tokens. Of each the FOLLOWERS tokens are kept that follow it most often, as far
// as one pass can tell (Misra and Gries, 1982): a further token takes the place of one that was seen once, or makes the
// rarest count less. Counts are halved at MAX_TOTAL, so that what a model says now counts more than what it said before.
//
// The table grows up to a size. From then on a new context takes the place of the one of its neighbourhood that was used
// least, and each fourth makes a neighbour count as used less: frequent ones stay, as long as they are frequent.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

constexpr int MAX_CONTEXT = 4, FOLLOWERS = 4, NEIGHBOURS = 4;
constexpr uint16_t MAX_TOTAL = 1024;
constexpr size_t MIN_SLOTS = 1024;

// The last tokens of a text.
struct Context {
  std::array<int32_t, MAX_CONTEXT> tokens{}; // the newest first
  int size = 0;

  void push(int32_t token) {
    for (int i = MAX_CONTEXT - 1; i > 0; --i) tokens[i] = tokens[i - 1];
    tokens[0] = token;
    size = std::min(size + 1, MAX_CONTEXT);
  }

  uint64_t key(int order) const {
    uint64_t hash = uint64_t(order) * 0x9e3779b97f4a7c15ULL;
    for (int i = 0; i < order; ++i) {
      hash = (hash ^ uint32_t(tokens[i])) * 0xff51afd7ed558ccdULL;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Phrase {
  uint64_t key = 0;
  std::array<int32_t, FOLLOWERS> tokens{};
  std::array<uint16_t, FOLLOWERS> counts{};
  uint16_t total = 0; // 0: the slot is free
  uint16_t used = 0;
};

class Phrases {
 public:
  explicit Phrases(int64_t max_bytes) : slots_(MIN_SLOTS), max_slots_(max_bytes / sizeof(Phrase)) {}

  void add(const Context& context, int32_t token) {
    std::array<uint64_t, MAX_CONTEXT> keys;
    for (int order = 1; order <= context.size; ++order) {
      const uint64_t key = keys[order - 1] = context.key(order);
      for (int i = 0; i < NEIGHBOURS; i += 2) __builtin_prefetch(&slots_[(key + i) & (slots_.size() - 1)], 1);
    }
    for (int i = 0; i < context.size; ++i) count(claim(keys[i]), token);
  }

  // Returns what has followed the last `order` tokens; null: nothing that is known.
  const Phrase* find(const Context& context, int order) const {
    const uint64_t key = context.key(order);
    for (int i = 0; i < NEIGHBOURS; ++i) {
      const Phrase& phrase = slots_[(key + i) & (slots_.size() - 1)];
      if (phrase.total && phrase.key == key) return &phrase;
    }
    return nullptr;
  }

  int64_t bytes() const { return int64_t(slots_.size() * sizeof(Phrase)); }

 private:
  // Returns the phrase of a key, or a free slot for it.
  Phrase* look(uint64_t key) {
    Phrase* free = nullptr;
    for (int i = 0; i < NEIGHBOURS; ++i) {
      Phrase& phrase = slots_[(key + i) & (slots_.size() - 1)];
      if (phrase.total && phrase.key == key) return &phrase;
      if (!phrase.total && !free) free = &phrase;
    }
    return free;
  }

  Phrase& claim(uint64_t key) {
    Phrase* found = look(key);
    while (!found && slots_.size() * 2 <= max_slots_) {
      grow();
      found = look(key);
    }
    if (!found) {
      const int aged = int(key >> 60); // none, three times out of four
      for (int i = 0; i < NEIGHBOURS; ++i) {
        Phrase& phrase = slots_[(key + i) & (slots_.size() - 1)];
        if (!found || phrase.used < found->used) found = &phrase;
        if (i == aged) phrase.used -= phrase.used > 0;
      }
      *found = {};
    }
    found->key = key;
    found->used += found->used < UINT16_MAX;
    return *found;
  }

  static void count(Phrase& phrase, int32_t token) {
    int least = 0;
    for (int i = 0; i < FOLLOWERS; ++i) {
      if (phrase.counts[i] && phrase.tokens[i] == token) {
        least = i;
        break;
      }
      if (phrase.counts[i] < phrase.counts[least]) least = i;
    }
    const bool is_known = phrase.counts[least] && phrase.tokens[least] == token;
    if (is_known || phrase.counts[least] <= 1) {
      phrase.counts[least] = is_known ? phrase.counts[least] + 1 : 1;
      phrase.tokens[least] = token;
    } else {
      --phrase.counts[least];
    }
    if (++phrase.total < MAX_TOTAL) return;
    phrase.total /= 2;
    for (uint16_t& one : phrase.counts) one /= 2;
  }

  void grow() {
    std::vector<Phrase> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Phrase& phrase : old) {
      if (!phrase.total) continue;
      if (Phrase* free = look(phrase.key)) *free = phrase; // no place: forgotten
    }
  }

  std::vector<Phrase> slots_; // a power of two
  size_t max_slots_;
};
