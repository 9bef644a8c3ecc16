// Threads that sleep between steps and spin within one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace triptych {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Everybody waits for everybody. Stages last microseconds, so waiting spins; a thread whose partner lost its core
// gives its own away after a while.
class Barrier {
 public:
  void reset(int count) { count_ = count; }
  void wait() {
    if (count_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
      pause();
      if (++spins % kSpins == 0) sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 4096;
  int count_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int thread = 1; thread < size; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
  }
  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  // body(thread) on `count` threads, the caller being thread 0. Returns when all are done.
  void run(int count, const std::function<void(int)>& body) {
    barrier.reset(count);
    if (count > 1) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        body_ = &body;
        active_ = count;
        pending_.store(count - 1, std::memory_order_relaxed);
        ++job_;
      }
      wake_.notify_all();
    }
    body(0);
    for (int spins = 0; pending_.load(std::memory_order_acquire) > 0;) {
      pause();
      if (++spins % 4096 == 0) sched_yield();
    }
  }

  Barrier barrier;

 private:
  void serve(int thread) {
    uint64_t seen = 0;
    for (;;) {
      const std::function<void(int)>* body;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return is_closing_ || job_ != seen; });
        if (is_closing_) return;
        seen = job_;
        if (thread >= active_) continue;
        body = body_;
      }
      (*body)(thread);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* body_ = nullptr;
  int active_ = 0;
  uint64_t job_ = 0;
  bool is_closing_ = false;
  std::atomic<int> pending_{0};
};

}  // namespace triptych
