// Threads that compute steps in order, joined by the caller while it waits for a step.
//
// So there are never more threads at work than intended, and none is idle: while the caller is busy with the previous
// step and the next one, the others carry on.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"
#include "stages.h"

namespace triptych {

// The work of a team.
class Computation {
 public:
  virtual ~Computation() = default;
  // Called by one thread; may throw std::bad_alloc.
  virtual void begin(const Step& step, int max_members) = 0;
  // Called by every member.
  virtual void compute(Member& member) = 0;
};

constexpr uint32_t kMaxUnderWay = 2;  // steps submitted but not yet waited for

class Team {
 public:
  // Starts `num_threads` threads; the caller takes part as one more.
  Team(Computation& computation, Stages& stages, int num_threads)
      : computation_(computation), stages_(stages), caller_(num_threads) {
    for (int place = 0; place < num_threads; ++place) members_.emplace_back(place);
    try {
      for (Member& member : members_) threads_.emplace_back([this, &member] { serve(member); });
    } catch (...) {  // the system cannot create more threads
      close();
      throw;
    }
  }

  ~Team() { close(); }

  // Queues a step for at most `max_members` threads; at most kMaxUnderWay may be queued. A step that is not
  // shared is left to the caller.
  void submit(const Step& step, int max_members, bool is_shared) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job(num_submitted_++) = {step, max_members, is_shared, false};
    }
    if (!is_shared) return;
    max_members > 1 ? has_work_.notify_all() : has_work_.notify_one();
  }

  // Waits until the oldest step not yet waited for is computed; returns whether that succeeded.
  bool wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (num_done_ == num_waited_) {
      if (num_members_ < current().max_members) {
        take_part(current(), caller_, lock);
      } else {
        is_done_.wait(lock, [&] { return num_done_ != num_waited_; });
      }
    }
    return !job(num_waited_++).has_failed;
  }

 private:
  struct Job {
    Step step;
    int max_members;
    bool is_shared;
    bool has_failed;
  };

  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closing_ = true;
    }
    has_work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void serve(Member& member) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      has_work_.wait(lock, [&] { return is_closing_ || (has_current() && wants_more(current())); });
      if (is_closing_) return;
      take_part(current(), member, lock);
    }
  }

  Job& job(uint32_t number) { return jobs_[number % kMaxUnderWay]; }
  // The job to compute now.
  bool has_current() const { return num_done_ != num_submitted_; }
  Job& current() { return job(num_done_); }
  bool wants_more(const Job& job) const { return job.is_shared && num_members_ < job.max_members; }

  // Joins the current job and computes until its end; the lock is released meanwhile.
  void take_part(Job& job, Member& member, std::unique_lock<std::mutex>& lock) {
    const uint32_t number = num_done_;
    const bool is_first = num_members_++ == 0;
    if (!is_first) stages_.ask(member);
    lock.unlock();
    const bool is_member = is_first ? begin(job, member) : stages_.is_admitted(member);
    bool ends_it = is_first && !is_member;
    if (is_member) {
      computation_.compute(member);
      ends_it = stages_.leave();
    }
    if (!ends_it) spin_until([&] { return num_done_ != number; });
    lock.lock();
    if (!ends_it) return;
    num_members_ = 0;
    ++num_done_;
    stages_.refuse();
    is_done_.notify_all();
    if (has_current()) has_work_.notify_all();
  }

  bool begin(Job& job, Member& member) {
    try {
      computation_.begin(job.step, job.max_members);
    } catch (...) {
      job.has_failed = true;
      return false;
    }
    stages_.begin(member);
    return true;
  }

  Computation& computation_;
  Stages& stages_;
  std::mutex mutex_;
  std::condition_variable has_work_, is_done_;
  std::array<Job, kMaxUnderWay> jobs_{};  // indexed by job number
  uint32_t num_submitted_ = 0, num_waited_ = 0;
  std::atomic<uint32_t> num_done_{0};  // changes under the lock
  int num_members_ = 0;                // of the current job, including those that have asked to join
  bool is_closing_ = false;
  Member caller_;
  std::deque<Member> members_;
  std::vector<std::thread> threads_;
};

}  // namespace triptych
