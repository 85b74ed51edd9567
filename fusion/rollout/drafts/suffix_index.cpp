// Indexes of text that predict the next tokens of a sequence from where its last ones occurred before.
//
// One index holds the responses to one prompt, a suffix automaton built online (Blumer et al., 1985; for several
// sequences: Mohri et al., 2009): a state stands for all strings with the same set of end positions, of which the
// longest has `length` tokens; its link leads to the longest suffix that occurs elsewhere too.
//
//   extend    a sequence by a token: O(1) amortised, and one count for every suffix of at least `min_match` tokens
//   draft     from the state of a sequence: the tokens that followed its suffixes of `min_match` to `max_match` tokens
//             elsewhere, as a tree, most probable first; O(MAX_FOLLOWERS) a token, however long the text
//
// What followed a longer suffix says more, what followed a shorter one is known from more places. So shares are mixed
// (Witten and Bell, 1991): behind a suffix that `total` tokens have followed, total / (total + DOUBT) of the share is
// theirs, and the rest that of the next shorter suffix. Of suffixes of one length, what followed it in responses to
// this prompt comes before what followed it in those to any prompt (phrases.h).
//
// A state counts the (weighted) occurrences of its strings, by source. Those of a string followed by a token are the
// count of the state that the token leads to, so edges need no count of their own.
//
// Most states have one edge, which they hold themselves; further ones are in a list, and found through a hash table.
// The list is a ring in the order of creation, as the tokens that follow most often have mostly followed early.
// tests/rollout/drafts/plain_indexes.py has the same structure and order of ties: the tests compare their drafts.

#include <algorithm>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "phrases.h"

namespace {

constexpr int32_t NONE = -1, ROOT = 0;
constexpr int MAX_COUNTED = 64; // suffixes of a token that are counted, or passed over: bounds the cost of "aaaa…"
constexpr int MAX_FOLLOWERS = 128; // tokens behind a string that are looked at, those that have followed it first
constexpr int SOURCES = 2, PHRASES = 2; // a node's source is that of a sequence, or phrases
constexpr double DOUBT = 2;             // a response without a reward has this weight
constexpr double PHRASE_DOUBT = 8;      // chosen on half of the recorded texts of benchmarks/drafts.py
constexpr double MIN_WEIGHT = 1 / 64.0; // of the share that is left to shorter suffixes, for them to be looked up

struct State {
  int32_t length, link = NONE;
  int32_t token = NONE, target = NONE; // the first edge
  int32_t more = NONE;                 // the last of the ring of further edges
  uint32_t count[SOURCES] = {0, 0};

  uint64_t total() const { return uint64_t(count[0]) + count[1]; }
};

struct Edge {
  int32_t owner, token, target, next;
};

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

// A node of a draft: a token behind its parent (NONE: behind the sequence).
struct Node {
  int32_t token, parent, depth, state;
  int32_t matched;    // tokens up to this one that the state's strings end with
  double share;       // of what followed the text before it
  double probability; // that it and all before it are right
  uint8_t source;
  Context context; // the last tokens, up to this one
};

struct Settings {
  int32_t max_depth, max_nodes, max_children, bins;
  double min_probability;
  const double* acceptance; // probability that a token is right, by its share, in bins
  const Phrases* phrases;   // null: none

  double probability_of(double share) const { return acceptance[std::min(int32_t(share * bins), bins - 1)]; }
};

class SuffixIndex {
 public:
  SuffixIndex(int min_match, int max_match, const int32_t* prompt, int64_t size)
      : min_match_(min_match), max_match_(max_match), slots_(16, NONE) {
    states_.push_back({0});
    extend(open(0, 1, false), prompt, size, nullptr);
    start_ = sequences_[0];
  }

  int32_t open(int source, uint32_t weight, bool is_new) {
    sequences_.push_back({start_.state, source, weight, is_new, start_.context});
    return int32_t(sequences_.size()) - 1;
  }

  void extend(int32_t sequence, const int32_t* tokens, int64_t size, Phrases* phrases) {
    auto& [state, source, weight, is_new, context] = sequences_[sequence];
    for (int64_t i = 0; i < size; ++i) {
      if (phrases && is_new) phrases->add(context, tokens[i]);
      context.push(tokens[i]);
      state = append(state, tokens[i]);
      int counted = 0;
      for (int32_t s = state; states_[s].length >= min_match_ && counted < MAX_COUNTED; s = states_[s].link) {
        states_[s].count[source] += weight;
        ++counted;
      }
    }
  }

  void draft(int32_t sequence, const Settings& settings, std::vector<Node>& out) const {
    const auto less_probable = [](const Ranked& a, const Ranked& b) {
      return a.node.probability != b.node.probability ? a.node.probability < b.node.probability : a.rank > b.rank;
    };
    std::priority_queue<Ranked, std::vector<Ranked>, decltype(less_probable)> open(less_probable);
    int32_t rank = 0;
    std::vector<Node> children;
    const auto propose = [&](const Node& node, int32_t parent, int32_t depth, double probability) {
      if (depth > settings.max_depth) return;
      children_of(node, settings, children);
      for (Node& child : children) {
        child.parent = parent, child.depth = depth, child.context = node.context;
        child.context.push(child.token);
        child.probability = probability * settings.probability_of(child.share);
        if (child.probability >= settings.min_probability) open.push({child, rank++});
      }
    };
    const size_t first = out.size();
    Node end{};
    end.state = sequences_[sequence].state, end.matched = max_match_, end.context = sequences_[sequence].context;
    propose(end, NONE, 1, 1.0);
    while (!open.empty() && out.size() - first < size_t(settings.max_nodes)) {
      const Node node = open.top().node;
      open.pop();
      out.push_back(node);
      propose(node, int32_t(out.size() - first) - 1, node.depth + 1, node.probability);
    }
  }

  int64_t bytes() const {
    return int64_t(states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
                   slots_.capacity() * sizeof(int32_t));
  }

 private:
  struct Sequence {
    int32_t state; // of all its tokens, prompt included
    int source;
    uint32_t weight;
    bool is_new; // whether its tokens count as phrases
    Context context;
  };
  struct Ranked {
    Node node;
    int32_t rank; // in order of proposal
  };

  // The tokens of the largest share behind the last `matched` tokens of a node, at most `max_match`, and behind ever
  // fewer.
  void children_of(const Node& node, const Settings& settings, std::vector<Node>& children) const {
    children.clear();
    int32_t state = node.state, matched = std::min(std::min(node.matched, max_match_), states_[state].length);
    for (int passed = 0; passed < MAX_COUNTED; ++passed) {
      const int32_t link = states_[state].link;
      if (link == NONE || states_[link].length < matched) break;
      state = link;
    }
    double weight = 1;
    int order = settings.phrases ? node.context.size : 0;
    const auto add_phrases = [&](int above) { // of more than so many tokens
      for (; order > above && weight > MIN_WEIGHT; --order) {
        const Phrase* phrase = settings.phrases->find(node.context, order);
        if (!phrase) continue;
        const double share = weight / (phrase->total + PHRASE_DOUBT);
        for (int i = 0; i < FOLLOWERS; ++i) {
          if (!phrase->counts[i]) continue;
          const int32_t* target = find(ROOT, phrase->tokens[i]);
          children.push_back({phrase->tokens[i], NONE, 0, target ? *target : ROOT, target ? 1 : 0,
                              phrase->counts[i] * share, 0.0, PHRASES, {}});
        }
        weight *= PHRASE_DOUBT / (phrase->total + PHRASE_DOUBT);
      }
    };
    while (matched >= min_match_ && weight > MIN_WEIGHT) {
      add_phrases(matched);
      const size_t first = children.size();
      double total = 0;
      const auto add = [&](int32_t token, int32_t target) {
        const State& reached = states_[target];
        if (!reached.total()) return; // of a sequence without weight, or beyond MAX_COUNTED
        total += double(reached.total());
        const bool is_history = reached.count[1] > reached.count[0];
        children.push_back({token, NONE, 0, target, matched + 1, double(reached.total()), 0.0, uint8_t(is_history), {}});
      };
      if (states_[state].token != NONE) add(states_[state].token, states_[state].target);
      int32_t e = first_of(state);
      for (int n = 1; e != NONE && n < MAX_FOLLOWERS; e = next_of(state, e), ++n) add(edges_[e].token, edges_[e].target);
      if (e != NONE) total = std::max(total, double(states_[state].total())); // with what the others were
      for (size_t i = first; i < children.size(); ++i) children[i].share *= weight / (total + DOUBT);
      weight *= DOUBT / (total + DOUBT);
      state = states_[state].link;
      matched = state == NONE ? 0 : std::min(matched, states_[state].length);
    }
    add_phrases(0);
    merge(children);
    const auto before = [](const Node& a, const Node& b) {
      return a.share != b.share ? a.share > b.share : a.token < b.token;
    };
    const size_t kept = std::min(children.size(), size_t(settings.max_children));
    std::partial_sort(children.begin(), children.begin() + kept, children.end(), before);
    children.resize(kept);
  }

  // Adds up the shares of equal tokens; of them that behind the longest suffix in this index is kept.
  static void merge(std::vector<Node>& children) {
    std::stable_sort(children.begin(), children.end(), [](const Node& a, const Node& b) { return a.token < b.token; });
    size_t kept = 0;
    for (size_t i = 0; i < children.size(); ++i) {
      if (kept && children[kept - 1].token == children[i].token) {
        const double share = children[kept - 1].share + children[i].share;
        if (children[i].matched > children[kept - 1].matched) children[kept - 1] = children[i];
        children[kept - 1].share = share;
      } else {
        children[kept++] = children[i];
      }
    }
    children.resize(kept);
  }

  // Returns the state of the strings of `last` with the token behind them, whose longest is one token longer.
  int32_t append(int32_t last, int32_t token) {
    int32_t* target = find(last, token);
    if (target) return states_[*target].length == states_[last].length + 1 ? *target : split(last, token, *target);
    const int32_t added = int32_t(states_.size());
    states_.push_back({states_[last].length + 1});
    int32_t s = last;
    for (; s != NONE && !(target = find(s, token)); s = states_[s].link) add_edge(s, token, added);
    int32_t link = ROOT;
    if (s != NONE) link = states_[*target].length == states_[s].length + 1 ? *target : split(s, token, *target);
    states_[added].link = link;
    return added;
  }

  // Splits from `whole` a state of its strings up to those of `owner` and the token, and returns it.
  int32_t split(int32_t owner, int32_t token, int32_t whole) {
    const int32_t part = int32_t(states_.size());
    State copy = states_[whole];
    copy.length = states_[owner].length + 1;
    copy.more = NONE;
    states_.push_back(copy);
    for (int32_t e = first_of(whole); e != NONE; e = next_of(whole, e)) {
      add_edge(part, edges_[e].token, edges_[e].target);
    }
    states_[whole].link = part;
    for (int32_t s = owner; s != NONE; s = states_[s].link) {
      int32_t* target = find(s, token);
      if (!target || *target != whole) break;
      *target = part;
    }
    return part;
  }

  int32_t* find(int32_t state, int32_t token) { return const_cast<int32_t*>(std::as_const(*this).find(state, token)); }
  const int32_t* find(int32_t state, int32_t token) const {
    const State& s = states_[state];
    if (s.token == token) return &s.target;
    if (s.more == NONE) return nullptr;
    const size_t mask = slots_.size() - 1;
    for (size_t i = slot_of(state, token);; i = (i + 1) & mask) {
      if (slots_[i] == NONE) return nullptr;
      const Edge& edge = edges_[slots_[i]];
      if (edge.owner == state && edge.token == token) return &edge.target;
    }
  }

  // The edges of a state besides its own one, in order of creation.
  int32_t first_of(int32_t state) const {
    const int32_t last = states_[state].more;
    return last == NONE ? NONE : edges_[last].next;
  }
  int32_t next_of(int32_t state, int32_t edge) const {
    return edge == states_[state].more ? NONE : edges_[edge].next;
  }

  void add_edge(int32_t state, int32_t token, int32_t target) {
    State& s = states_[state];
    if (s.token == NONE) {
      s.token = token, s.target = target;
      return;
    }
    const int32_t added = int32_t(edges_.size());
    edges_.push_back({state, token, target, added});
    if (s.more != NONE) std::swap(edges_[added].next, edges_[s.more].next);
    s.more = added;
    if (edges_.size() * 2 > slots_.size()) {
      slots_.assign(slots_.size() * 2, NONE);
      for (size_t e = 0; e + 1 < edges_.size(); ++e) put(int32_t(e));
    }
    put(s.more);
  }

  void put(int32_t edge) {
    const size_t mask = slots_.size() - 1;
    size_t i = slot_of(edges_[edge].owner, edges_[edge].token);
    while (slots_[i] != NONE) i = (i + 1) & mask;
    slots_[i] = edge;
  }

  size_t slot_of(int32_t state, int32_t token) const {
    return mix((uint64_t(uint32_t(state)) << 32) | uint32_t(token)) & (slots_.size() - 1);
  }

  int min_match_, max_match_;
  Sequence start_{ROOT, 0, 1, false, {}}; // the prompt
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> slots_; // hash table of edges_ by owner and token
  std::vector<Sequence> sequences_;
};

} // namespace

// The functions that native.py calls. Arrays of n requests; texts and drafts are concatenated, offsets have n + 1
// items.
extern "C" {

void* suffix_index_new(int min_match, int max_match, const int32_t* prompt, int64_t size) {
  return new SuffixIndex(min_match, max_match, prompt, size);
}

void suffix_index_delete(void* index) {
  delete static_cast<SuffixIndex*>(index);
}

void* phrases_new(int64_t max_bytes) {
  return new Phrases(max_bytes);
}

void phrases_delete(void* phrases) {
  delete static_cast<Phrases*>(phrases);
}

int64_t phrases_bytes(void* phrases) {
  return static_cast<Phrases*>(phrases)->bytes();
}

int32_t suffix_index_open(void* index, int source, uint32_t weight, bool is_new) {
  return static_cast<SuffixIndex*>(index)->open(source, weight, is_new);
}

int64_t suffix_index_bytes(void* index) {
  return static_cast<SuffixIndex*>(index)->bytes();
}

// Returns the bytes by which the indexes have grown.
int64_t suffix_index_extend(
    int64_t n, void* const* indexes, const int32_t* sequences, const int32_t* tokens, const int64_t* offsets,
    void* phrases) {
  int64_t grown = 0;
  for (int64_t i = 0; i < n; ++i) {
    auto* index = static_cast<SuffixIndex*>(indexes[i]);
    grown -= index->bytes();
    index->extend(sequences[i], tokens + offsets[i], offsets[i + 1] - offsets[i], static_cast<Phrases*>(phrases));
    grown += index->bytes();
  }
  return grown;
}

void suffix_index_draft(
    int64_t n, void* const* indexes, const int32_t* sequences, const int32_t* max_depth, const int32_t* max_nodes,
    void* phrases, int32_t max_children, int32_t bins, double min_probability, const double* acceptance, int64_t* offsets,
    int32_t* tokens, int32_t* parents, double* shares, double* probabilities, uint8_t* sources) {
  std::vector<Node> nodes;
  int64_t at = 0;
  offsets[0] = 0;
  for (int64_t i = 0; i < n; ++i) {
    nodes.clear();
    const Settings settings{max_depth[i], max_nodes[i], max_children, bins, min_probability, acceptance,
                            static_cast<const Phrases*>(phrases)};
    static_cast<const SuffixIndex*>(indexes[i])->draft(sequences[i], settings, nodes);
    for (const Node& node : nodes) {
      tokens[at] = node.token, parents[at] = node.parent, shares[at] = node.share;
      probabilities[at] = node.probability, sources[at] = node.source;
      ++at;
    }
    offsets[i + 1] = at;
  }
}
}
