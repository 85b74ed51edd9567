// Streams of a card. Eager (the default): work is complete when its call returns, and a stream is only a name.
//
// Late (`streams=adversarial`): a stream is a queue; non-blocking copies and asynchronous collectives stay in it until a
// program may rely on their result: at a synchronize, a blocking copy, or a kernel on that stream or on one that waits
// for it. Until then their outputs keep their previous contents. Kernels run when they are called, after all that their
// stream must wait for. Freed memory is poisoned as soon as its own stream may reuse it.
//
// Timed (`streams=timed`): late, and a copy to or from the host and a collective also take the time that their bytes
// need at the card's rates, one after the other in each stream, from the moment they are queued. Whoever waits for one
// sleeps until then, so that work beside it hides its time, as on a card with engines of its own for copies.
//
// So of all orders that a real card may choose, copies and collectives run as late and kernels as early as possible. A
// correctly synchronised program sees no difference; one that forgets to wait reads previous contents or poison.
#pragma once

#include "emulator.h"

#include <atomic>
#include <chrono>
#include <functional>

namespace npu {

using Clock = std::chrono::steady_clock;

// A place in the queue of a stream: reached when the first `count` pieces of its work are done.
struct Moment {
  int card = 0;
  c10::StreamId stream = 0;
  uint64_t count = 0; // 0: always reached
  Clock::time_point due{}; // timed: not reached before
};

// Bytes per second of a card's asynchronous work; 0: it takes no time of its own.
struct Rates {
  double host = 0; // copies to and from the host
  double wire = 0; // collectives
};
Rates rates_of(int card);
inline double seconds_of(double bytes, double rate) {
  return rate > 0 ? bytes / rate : 0;
}

extern std::atomic<bool> late_cards[kCards];
inline bool is_late(int card) {
  return late_cards[card].load(std::memory_order_relaxed);
}
void set_late(int card, bool late, Rates rates); // the card must be idle

void enqueue(int card, c10::StreamId stream, std::function<void()> work, double seconds = 0);
void enqueue_wait(int card, c10::StreamId stream, const Moment& moment); // returns at once
Moment end_of(int card, c10::StreamId stream);
bool reached(const Moment& moment);
void reach(const Moment& moment); // runs the work up to it; rethrows its errors
void reach_end_of(int card, c10::StreamId stream);
void reach_all(int card);
bool is_idle(int card);
void forget_work(); // at the end of the process: drops work that was not waited for

void poison(void* memory, int64_t bytes);

} // namespace npu
