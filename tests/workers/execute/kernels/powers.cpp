// Prints the greatest relative errors of functions of single values, and fails where a number must be exact.
#include <cmath>
#include <cstdio>

#include "activations.h"
#include "rounded_bytes.h"

using namespace triptych;

namespace {

// Of what `approximate` finds for numbers from `low` to `high`.
template <class Approximate, class Exact>
double greatest_error(float low, float high, const Approximate& approximate, const Exact& exact) {
  constexpr int kVectors = 50000;
  double worst = 0;
  for (int i = 0; i < kVectors; ++i) {
    float x[kLanes], y[kLanes];
    for (int lane = 0; lane < kLanes; ++lane)
      x[lane] = low + (high - low) * float(i * kLanes + lane) / (kVectors * kLanes);
    store(y, approximate(load<Floats>(x)));
    for (int lane = 0; lane < kLanes; ++lane) {
      const double expected = exact(double(x[lane]));
      if (expected != 0) worst = std::fmax(worst, std::fabs(y[lane] / expected - 1));
    }
  }
  return worst;
}

float first(Floats lanes) {
  float values[kLanes];
  store(values, lanes);
  return values[0];
}

bool has_unit(float strange, bool is_number) {
  float row[4 * kLanes] = {};
  row[37] = strange;
  return std::isnan(Magnitude(row, 4 * kLanes).unit()) != is_number;
}

}  // namespace

int main() {
  const auto exact_silu = [](double x) { return x / (1 + std::exp(-x)); };
  const double errors[] = {
      greatest_error(-87, 88, [](Floats x) { return exp(x); }, [](double x) { return std::exp(x); }),
      greatest_error(-126, 127, [](Floats x) { return exp2(x); }, [](double x) { return std::exp2(x); }),
      greatest_error(-80, 80, [](Floats x) { return silu(x); }, exact_silu),
  };
  for (double error : errors) std::printf("%g\n", error);
  const bool are_exact = first(exp(broadcast(0.0f))) == 1 && first(exp(broadcast(-88.0f))) == 0 &&
                         first(exp2(broadcast(0.0f))) == 1 && first(exp2(broadcast(-151.0f))) == 0 &&
                         std::isnan(first(exp2(broadcast(NAN)))) && std::isnan(first(silu(broadcast(NAN)))) &&
                         first(silu(broadcast(INFINITY))) == INFINITY && first(silu(broadcast(0.0f))) == 0;
  const bool are_noticed =
      has_unit(NAN, false) && has_unit(-INFINITY, false) && has_unit(-3e38f, true) && has_unit(0, true);
  return are_exact && are_noticed ? 0 : 1;
}
