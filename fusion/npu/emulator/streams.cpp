// Queues of work, run as late as synchronisation allows (streams.h).
#include "streams.h"

#include <Python.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <optional>
#include <thread>

namespace npu {

std::atomic<bool> late_cards[kCards];

namespace {

Rates rates[kCards];

struct Work {
  std::function<void()> run; // empty: waits for `moment`
  Moment moment;
  Clock::time_point due{};
};

struct Stream {
  std::deque<Work> queue;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  Clock::time_point free_at{}; // timed: when all its work is due
  std::optional<std::thread::id> worker; // the thread that runs the front of the queue
};

struct Streams {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, c10::StreamId>, Stream> all;
};

Streams& streams() {
  static auto* instance = new Streams(); // never destroyed: tensors may outlive static destructors
  return *instance;
}

// Work may take long, wait for other processes, and release Python objects.
struct WithoutGil {
  PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state) PyEval_RestoreThread(state);
  }
};

// Marks the front of a queue as done, whether it returned or raised.
struct Turn {
  Turn(Streams& all, Stream& stream, std::unique_lock<std::mutex>& lock) : all(all), stream(stream), lock(lock) {
    work = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.worker = std::this_thread::get_id();
    lock.unlock();
  }
  ~Turn() {
    work = {}; // may free tensors, which re-enters this file
    lock.lock();
    stream.worker.reset();
    ++stream.done;
    all.changed.notify_all();
  }
  Streams& all;
  Stream& stream;
  std::unique_lock<std::mutex>& lock;
  Work work;
};

void push(int card, c10::StreamId stream, Work work, double seconds) {
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& queue = all.all[{card, stream}];
  const auto start = seconds > 0 ? std::max(queue.free_at, Clock::now()) : queue.free_at;
  queue.free_at = std::max(start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)),
                           work.moment.due);
  work.due = queue.free_at;
  queue.queue.push_back(std::move(work));
  ++queue.enqueued;
}

} // namespace

Rates rates_of(int card) {
  return rates[card];
}

void set_late(int card, bool late, Rates of_card) {
  late_cards[card] = late;
  rates[card] = of_card;
}

void enqueue(int card, c10::StreamId stream, std::function<void()> work, double seconds) {
  push(card, stream, {std::move(work), {}}, seconds);
}

void enqueue_wait(int card, c10::StreamId stream, const Moment& moment) {
  const bool same = moment.card == card && moment.stream == stream;
  if (!same && !reached(moment)) push(card, stream, {nullptr, moment}, 0);
}

Moment end_of(int card, c10::StreamId stream) {
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto entry = all.all.find({card, stream});
  if (entry == all.all.end()) return {card, stream};
  return {card, stream, entry->second.enqueued, entry->second.free_at};
}

bool reached(const Moment& moment) {
  if (moment.count == 0) return true;
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.all[{moment.card, moment.stream}].done >= moment.count;
}

void reach(const Moment& moment) {
  if (reached(moment)) return;
  const WithoutGil without_gil;
  auto& all = streams();
  std::unique_lock<std::mutex> lock(all.mutex);
  auto& stream = all.all[{moment.card, moment.stream}];
  while (stream.done < moment.count && !(stream.queue.empty() && !stream.worker)) {
    if (stream.worker) {
      if (*stream.worker == std::this_thread::get_id()) return; // work that waits for itself
      all.changed.wait(lock);
      continue;
    }
    Turn turn(all, stream, lock);
    std::this_thread::sleep_until(turn.work.due); // at once, unless it is timed
    if (turn.work.run) {
      turn.work.run();
    } else {
      reach(turn.work.moment);
    }
  }
}

void reach_end_of(int card, c10::StreamId stream) {
  reach(end_of(card, stream));
}

void reach_all(int card) {
  std::vector<c10::StreamId> ids;
  {
    auto& all = streams();
    std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& [key, stream] : all.all) {
      if (key.first == card && stream.done < stream.enqueued) ids.push_back(key.second);
    }
  }
  for (const auto id : ids) reach_end_of(card, id);
}

bool is_idle(int card) {
  auto& all = streams();
  std::lock_guard<std::mutex> lock(all.mutex);
  return std::all_of(all.all.begin(), all.all.end(), [&](const auto& entry) {
    return entry.first.first != card || entry.second.done == entry.second.enqueued;
  });
}

void forget_work() {
  std::map<std::pair<int, c10::StreamId>, Stream> forgotten;
  std::lock_guard<std::mutex> lock(streams().mutex);
  for (auto& [key, stream] : streams().all) {
    forgotten[key].queue.swap(stream.queue);
    stream.done = stream.enqueued;
  }
}

// Not a number in every floating-point type, and far from any index in the others.
void poison(void* memory, int64_t bytes) {
  auto* words = static_cast<uint16_t*>(memory);
  std::fill(words, words + bytes / 2, uint16_t{0xFFFB});
}

} // namespace npu
