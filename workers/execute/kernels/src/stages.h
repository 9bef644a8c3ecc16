// A step is a sequence of stages separated by barriers. All members reach the barrier after a stage before the next
// stage begins, and threads that asked to join meanwhile are admitted there: no step waits for a thread that is busy
// elsewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <sched.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace triptych {

// Stages last microseconds, so waiting spins; it yields the core after a while, in case the other thread lost its own.
template <class Condition>
inline void spin_until(const Condition& condition) {
  constexpr int kSpins = 4096;
  for (int spins = 1; !condition(); ++spins) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` does nothing on most processors
#endif
    if (spins % kSpins == 0) sched_yield();
  }
}

// A word in which threads at work store the time, so that whoever watches it can tell a long step from one that hangs.
class Progress {
 public:
  // `word` must live as long as steps are computed; null: nothing is stored.
  void show_in(int64_t* word) { word_ = word; }

  void show() const {
    if (!word_) return;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // a few nanoseconds, whatever the clock source; late by milliseconds
    __atomic_store_n(word_, int64_t{now.tv_sec} * 1000000000 + now.tv_nsec, __ATOMIC_RELAXED);
  }

 private:
  int64_t* word_ = nullptr;
};

// A thread, and its role in the current step.
struct Member {
  explicit Member(int place) : place(place) {}

  const int place;      // index of its buffers, the same in every step
  int rank = 0;         // among the members of the step
  int first_stage = 0;  // earlier stages were over when it joined
  int next_stage = 0;
  enum Answer { kNone, kAdmitted, kTooLate };
  std::atomic<Answer> answer{kNone};  // to its request to join
  Member* next = nullptr;             // in the list of requests
};

class Stages {
 public:
  // Changes only while no step is computed.
  Progress progress;

  explicit Stages(int max_members) : tickets_(max_members) {}

  int num_members() const { return num_members_; }

  // Starts a step, with `first` as its only member so far.
  void begin(Member& first) {
    num_members_ = 1;
    num_left_.store(0, std::memory_order_relaxed);
    first.rank = first.first_stage = first.next_stage = 0;
  }

  // Asks to join the step. Not to be called by two threads at once, nor concurrently with `refuse`.
  void ask(Member& member) {
    member.answer.store(Member::kNone, std::memory_order_relaxed);
    member.next = asking_.load(std::memory_order_relaxed);
    while (!asking_.compare_exchange_weak(member.next, &member, std::memory_order_release)) {
    }
  }

  // Waits for the answer to `ask`; whether the member has joined the step.
  bool is_admitted(Member& member) {
    spin_until([&] { return member.answer.load(std::memory_order_acquire) != Member::kNone; });
    return member.answer.load(std::memory_order_relaxed) == Member::kAdmitted;
  }

  // The step is over: pending requests are refused as too late.
  void refuse() { answer_all(asking_.exchange(nullptr, std::memory_order_acquire), Member::kTooLate); }

  // Runs the member's next stage and the barrier after it, unless that stage was over when the member joined.
  template <class Body>
  void run(Member& member, const Body& body) {
    if (member.next_stage++ < member.first_stage) return;
    body();
    cross(member.next_stage);
  }

  // Whether the member takes part in any of the next `num_stages` stages.
  bool is_in_time(const Member& member, int num_stages) const {
    return member.next_stage + num_stages > member.first_stage;
  }

  // Calls visit(item) for 0..count, each item by whichever member is free. At most once in a stage.
  template <class Visit>
  void for_items(int count, const Visit& visit) {
    take(0, count, visit);
  }

  // Calls visit(owner, item) for 0..num_items(owner), for each rank `owner`: members visit their own items in order,
  // then those that others have left. At most once in a stage, without `for_items`.
  template <class NumItems, class Visit>
  void for_shares(const Member& me, const NumItems& num_items, const Visit& visit) {
    for (int turn = 0; turn < num_members_; ++turn) {
      const int owner = (me.rank + turn) % num_members_;
      take(owner, num_items(owner), [&](int item) { visit(owner, item); });
    }
  }

  // A member leaves after its last stage; true for the last one to leave.
  bool leave() {
    const int num_members = num_members_;  // read first: once this member has left, the next step may begin
    return num_left_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_members;
  }

 private:
  struct alignas(64) Ticket {
    std::atomic<int> next{0};
  };

  template <class Visit>
  void take(int number, int count, const Visit& visit) {
    std::atomic<int>& next = tickets_[number].next;
    if (next.load(std::memory_order_relaxed) >= count) return;
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      visit(item);
      progress.show();
    }
  }

  void cross(int next_stage) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    const int num_members = num_members_;
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_members) {
      spin_until([&] { return round_.load(std::memory_order_acquire) != round; });
      return;
    }
    progress.show();
    num_arrived_.store(0, std::memory_order_relaxed);
    for (int rank = 0; rank < num_members; ++rank) tickets_[rank].next.store(0, std::memory_order_relaxed);
    Member* asking = nullptr;
    if (asking_.load(std::memory_order_relaxed)) asking = asking_.exchange(nullptr, std::memory_order_acquire);
    for (Member* member = asking; member; member = member->next) {
      member->rank = num_members_++;
      member->first_stage = next_stage;
      member->next_stage = 0;
    }
    round_.store(round + 1, std::memory_order_release);
    answer_all(asking, Member::kAdmitted);  // only now, as newly admitted members read the round
  }

  static void answer_all(Member* member, Member::Answer answer) {
    while (member) {
      Member* const next = member->next;  // read first: once answered, the member may ask again
      member->answer.store(answer, std::memory_order_release);
      member = next;
    }
  }

  int num_members_ = 0;  // changes only while all members are at a barrier
  std::atomic<int> num_left_{0};
  alignas(64) std::atomic<Member*> asking_{nullptr};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::vector<Ticket> tickets_;  // by rank
};

}  // namespace triptych
