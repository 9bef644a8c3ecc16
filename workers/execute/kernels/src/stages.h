// A step is a row of stages. All who compute it arrive at the border behind a stage before the next one begins, and
// there whoever has come meanwhile is let in: no step waits for a thread that is busy elsewhere.
#pragma once

#include <atomic>
#include <cstdint>

#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace triptych {

// Stages last microseconds, so waiting spins; a thread whose partner lost its core gives its own away after a while.
template <class Condition>
inline void spin_until(const Condition& condition) {
  constexpr int kSpins = 4096;
  for (int spins = 1; !condition(); ++spins) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (spins % kSpins == 0) sched_yield();
  }
}

// A thread, and its part in the step that it computes.
struct Member {
  explicit Member(int place) : place(place) {}

  const int place;      // of its buffers, in every step
  int rank = 0;         // among those who compute the step
  int first_stage = 0;  // those before were over when it came
  int next_stage = 0;
  enum Answer { kNone, kAdmitted, kTooLate };
  std::atomic<Answer> answer{kNone};  // to its wish to join
  Member* next = nullptr;             // of those who wish to
};

class Stages {
 public:
  int num_members() const { return num_members_; }

  // A step of which `first` is the only member so far.
  void begin(Member& first) {
    num_members_ = 1;
    num_left_.store(0, std::memory_order_relaxed);
    first.rank = first.first_stage = first.next_stage = 0;
  }

  // One caller at a time, and none at a time when `refuse` is called.
  void ask(Member& member) {
    member.answer.store(Member::kNone, std::memory_order_relaxed);
    member.next = asking_.load(std::memory_order_relaxed);
    while (!asking_.compare_exchange_weak(member.next, &member, std::memory_order_release)) {
    }
  }

  // Whether the member who asked has become one.
  bool is_admitted(Member& member) {
    spin_until([&] { return member.answer.load(std::memory_order_acquire) != Member::kNone; });
    return member.answer.load(std::memory_order_relaxed) == Member::kAdmitted;
  }

  // The step is over: those who still ask came too late.
  void refuse() { answer_all(asking_.exchange(nullptr, std::memory_order_acquire), Member::kTooLate); }

  // The next stage of a member, unless it was over when the member came, and the border behind it.
  template <class Body>
  void run(Member& member, const Body& body) {
    if (member.next_stage++ < member.first_stage) return;
    body();
    cross(member.next_stage);
  }

  // Whether the member takes part in one of the next so many stages.
  bool is_in_time(const Member& member, int num_stages) const {
    return member.next_stage + num_stages > member.first_stage;
  }

  // visit(item) for 0..count by whichever member is free, once in a stage.
  template <class Visit>
  void for_items(int count, const Visit& visit) {
    for (int item; (item = tickets_.fetch_add(1, std::memory_order_relaxed)) < count;) visit(item);
  }

  // Behind its last stage a member leaves; true for the last one.
  bool leave() {
    const int num_members = num_members_;  // once it has left, the next step may begin
    return num_left_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_members;
  }

 private:
  void cross(int next_stage) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    const int num_members = num_members_;
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_members) {
      spin_until([&] { return round_.load(std::memory_order_acquire) != round; });
      return;
    }
    num_arrived_.store(0, std::memory_order_relaxed);
    tickets_.store(0, std::memory_order_relaxed);
    Member* asking = nullptr;
    if (asking_.load(std::memory_order_relaxed)) asking = asking_.exchange(nullptr, std::memory_order_acquire);
    for (Member* member = asking; member; member = member->next) {
      member->rank = num_members_++;
      member->first_stage = next_stage;
      member->next_stage = 0;
    }
    round_.store(round + 1, std::memory_order_release);
    answer_all(asking, Member::kAdmitted);  // only now: who is let in reads the round
  }

  static void answer_all(Member* member, Member::Answer answer) {
    while (member) {
      Member* const next = member->next;  // once answered, it may ask again
      member->answer.store(answer, std::memory_order_release);
      member = next;
    }
  }

  int num_members_ = 0;  // changes where all members are at a border
  std::atomic<int> num_left_{0};
  alignas(64) std::atomic<Member*> asking_{nullptr};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> tickets_{0};
};

}  // namespace triptych
