// Stands in for the tiles of pages in eight bits. They use no instruction in bfloat16, so they are tested at another
// level with VNNI, and would take a quarter of the time to compile what is built of this one.
#include <cstdlib>

#include "byte_attention.h"

namespace triptych {

void ByteTiles::score(int, Floats*, Rows, int, const Separate&, Ahead&, const ToScores<true>&) { std::abort(); }
void ByteTiles::add_scores(int, Floats*, Rows, int, const Separate&, Ahead&, const ToScores<false>&) { std::abort(); }
void ByteTiles::add_values(int, Floats*, int, Rows, int, const Adjacent<>&, Ahead&, const TimesUnits&) { std::abort(); }
void ByteTiles::add_vector(int, Floats*, int, Rows, int, const Adjacent<>&, Ahead&, const TimesUnits&) { std::abort(); }

}  // namespace triptych
