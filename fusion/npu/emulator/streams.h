// Streams of a card. Eager (the default): work is done when the call that asks for it returns, and a stream is a name.
//
// Late (`streams=adversarial`): a stream is a queue, and non-blocking copies and asynchronous collectives stay in it until
// somebody has a right to their result: a synchronisation, a blocking copy, or a kernel on that stream or on one that was
// told to wait for it. Until then their outputs hold what they held before. Kernels run when they are called, after all
// that their stream has to wait for. Memory that is freed is poisoned as soon as its own stream may use it again.
//
// So of all orders that a real card may choose, copies and collectives get the latest and kernels the earliest. A program
// that waits where it must cannot tell; one that forgets reads what was there before, or poison.
#pragma once

#include "emulator.h"

#include <atomic>
#include <functional>

namespace npu {

// A place in the queue of a stream: reached when the first `count` pieces of its work are done.
struct Moment {
  int card = 0;
  c10::StreamId stream = 0;
  uint64_t count = 0; // 0: always reached
};

extern std::atomic<bool> late_cards[kCards];
inline bool is_late(int card) {
  return late_cards[card].load(std::memory_order_relaxed);
}
void set_late(int card, bool late); // the card has no work

void enqueue(int card, c10::StreamId stream, std::function<void()> work);
void enqueue_wait(int card, c10::StreamId stream, const Moment& moment); // returns at once
Moment end_of(int card, c10::StreamId stream);
bool reached(const Moment& moment);
void reach(const Moment& moment); // does what is due; raises what the work raised
void reach_end_of(int card, c10::StreamId stream);
void reach_all(int card);
bool is_idle(int card);
void forget_work(); // at the end of the process: what nobody waited for is never done

void poison(void* memory, int64_t bytes);

} // namespace npu
