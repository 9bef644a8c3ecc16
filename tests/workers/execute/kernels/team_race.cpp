// Steps of counted stages through a team of the kernels, whose caller turns up at any moment. Built with
// ThreadSanitizer, which ends it with 66 after a data race; a wrong sum aborts.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <utility>
#include <vector>

#include "team.h"

using namespace triptych;

namespace {

constexpr int kCells = 64;

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Each round is four stages that read what the stage before has written: in shares, by items, in shares that others help
// with, and by one member.
struct Sums : Computation {
  explicit Sums(Stages& stages) : stages(stages), cells(kCells), sums(kCells), copies(kCells) {}

  void begin(const Step& step, int) override {
    if (step.num_rows < 0) throw std::bad_alloc();
    num_rounds = step.num_rows;
  }

  void compute(Member& me) override {
    for (int round = 0; round < num_rounds; ++round) {
      stages.run(me, [&] {
        const int count = stages.num_members();
        for (int i = kCells * me.rank / count; i < kCells * (me.rank + 1) / count; ++i) cells[i] = round + i;
      });
      stages.run(me, [&] {
        stages.for_items(kCells, [&](int item) { sums[item] = cells[item] + cells[kCells - 1 - item]; });
      });
      stages.run(me, [&] {
        const auto first = [&](int owner) { return kCells * owner * owner / (stages.num_members() * stages.num_members()); };
        stages.for_shares(me, [&](int owner) { return first(owner + 1) - first(owner); },
                          [&](int owner, int item) { copies[first(owner) + item] = sums[first(owner) + item]; });
      });
      stages.run(me, [&] {
        if (me.rank > 0) return;
        total = 0;
        for (int& copy : copies) total += std::exchange(copy, 0);
      });
      if (stages.is_in_time(me, 1)) check(total == kCells * (2 * round + kCells - 1), "a wrong sum");
    }
  }

  Stages& stages;
  std::vector<int> cells, sums, copies;
  int num_rounds = 0, total = 0;
};

void run(int num_own, int max_members, int num_steps) {
  std::mt19937 random(num_own * 10 + max_members);
  const auto below = [&](int limit) { return int(random() % limit); };
  Stages stages(num_own + 1);
  Sums sums(stages);
  Team team(sums, stages, num_own);
  std::deque<bool> fails;  // of the steps under way
  for (int i = 0; i < num_steps; ++i) {
    while (fails.empty() || (fails.size() < 2 && below(3))) {
      Step step{};
      fails.push_back(below(17) == 0);
      step.num_rows = fails.back() ? -1 : 1 + below(12);
      team.submit(step, below(3) ? max_members : 1, below(4) > 0);
    }
    for (volatile int busy = below(2000) * below(3); busy > 0; busy = busy - 1) {
    }
    check(team.wait() != fails.front(), "a wrong status");
    fails.pop_front();
  }
}

}  // namespace

int main() {
  for (int num_own : {0, 1, 2, 7})
    for (int max_members : {1, 2, 4, 8})
      if (max_members <= num_own + 1) run(num_own, max_members, 1000);
}
