# mypy: allow-untyped-defs
"""C++ kernel of one recurrent layer: all time steps, one or both directions, float32."""

from collections.abc import Sequence

from .. import config, ir
from ..rnn_ops import GATES, panel_units, vector_lanes
from ..utils import parallel_num_threads, Placeholder
from ..virtualized import V
from .cpp import get_export_declaration
from .cpp_template import CppTemplate
from .cpp_template_kernel import CppTemplateKernel


# How it works.  The gates of UNITS * LANES hidden units stand side by side in a
# panel, so that one block of accumulators holds all gates of a unit and the state is
# updated before the accumulators leave the registers.  The product with the input is
# done for a chunk of time steps at once, into a buffer of gates that stays in cache;
# each step then adds the product with the previous state.  Threads share the
# directions, the rows of the batch, or the panels; only the last need a barrier in
# each step.
RNN_TEMPLATE = r"""
{{template.header().getvalue()}}
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <thread>

namespace {{kernel.kernel_name}}_rnn {

enum Mode { LSTM, GRU, RNN_TANH, RNN_RELU };
constexpr Mode MODE = {{template.mode}};
constexpr int64_t INPUT = {{template.input_size}};
constexpr int64_t HIDDEN = {{template.hidden_size}};
constexpr int64_t OUTPUT = {{template.output_size}};  // differs with projections
constexpr int64_t DIRECTIONS = {{template.reverse|length}};
constexpr bool REVERSE[] = { {{template.reverse|map("int")|join(", ")}} };
constexpr bool HAS_BIASES = {{template.has_biases|int}};
// Whether the weights come as in the module, or else as rnn_pack_weights lays them out.
constexpr bool RAW = {{(template.lanes == 0)|int}};

using Vec = at::vec::Vectorized<float>;
constexpr int64_t LANES = Vec::size();
static_assert(RAW || LANES == {{template.lanes}}, "packed for other vectors");
constexpr int64_t GATES = {{template.gates}};
constexpr int64_t UNITS = {{template.units}};  // vectors of hidden units in a panel
constexpr int64_t WIDTH = GATES * UNITS;  // vectors in a row of a panel
constexpr int64_t PANELS = (HIDDEN + UNITS * LANES - 1) / (UNITS * LANES);
constexpr int64_t BIASES = MODE == GRU ? 2 : 1;
// The new gate of GRU multiplies only the part that comes from the state.
constexpr int64_t SLOTS = MODE == GRU ? 4 : WIDTH;
constexpr bool PROJECT = OUTPUT != HIDDEN;
constexpr int64_t PROJECT_WIDTH = 4;
constexpr int64_t PROJECT_PANELS =
    PROJECT ? (OUTPUT + PROJECT_WIDTH * LANES - 1) / (PROJECT_WIDTH * LANES) : 0;
// Sections of the packed weights, in floats
constexpr int64_t PANEL_SIZE = (INPUT + OUTPUT) * WIDTH * LANES;
constexpr int64_t BIAS_OFFSET = PANELS * PANEL_SIZE;
constexpr int64_t PROJECT_OFFSET = BIAS_OFFSET + PANELS * BIASES * WIDTH * LANES;
constexpr int64_t PACKED_SIZE =
    PROJECT_OFFSET + PROJECT_PANELS * HIDDEN * PROJECT_WIDTH * LANES;

#if defined(CPU_CAPABILITY_AVX512)
constexpr int64_t ACCUMULATORS = 24;
#else
constexpr int64_t ACCUMULATORS = 12;
#endif
constexpr int64_t BLOCK_BYTES = 12 * 1024;  // weights that stay in the L1 cache
constexpr int64_t CHUNK_BYTES = 256 * 1024;  // gates that stay in the L2 cache
constexpr int64_t CHUNK_ROWS = 64;  // enough rows to pay for reading the weights
constexpr int64_t MIN_THREAD_ROWS = 8;
constexpr int64_t MIN_STEP_WORK = 16 * 1024;  // products a thread and step, per barrier
constexpr int64_t MIN_CALL_WORK = 1024 * 1024;  // products a thread, to pay for waking it
constexpr int64_t MIN_PACK_ROWS = 8;  // T * B from which packing in the call pays

// Not c10::ForcedUnroll, whose lambdas are calls where there are many of them
#define UNROLLED _Pragma("GCC unroll 16")

// expm1 by the halves of ln(2), Cody and Waite; the polynomial is Taylor's.
inline Vec expm1_in_range(Vec x) {
  const Vec n = (x * Vec(1.44269504f)).round();
  Vec r = at::vec::fnmadd(n, Vec(0.693145752f), x);
  r = at::vec::fnmadd(n, Vec(1.42860677e-06f), r);
  Vec p(1.f / 5040);
  p = at::vec::fmadd(p, r, Vec(1.f / 720));
  p = at::vec::fmadd(p, r, Vec(1.f / 120));
  p = at::vec::fmadd(p, r, Vec(1.f / 24));
  p = at::vec::fmadd(p, r, Vec(1.f / 6));
  p = at::vec::fmadd(p, r, Vec(.5f));
  p = at::vec::fmadd(r * r, p, r);
  using Int = at::vec::Vectorized<int32_t>;
  const Int exponent = at::vec::convert_to_int_of_same_size(n) + Int(127);
  const Vec scale = at::vec::cast<float>(exponent << Int(23));
  return at::vec::fmadd(scale, p, scale - Vec(1.f));
}

inline Vec sigmoid(Vec x) {
  return Vec(1.f) / (expm1_in_range(at::vec::clamp(x.neg(), Vec(-87.f), Vec(87.f))) + Vec(2.f));
}

inline Vec tanh(Vec x) {
  const Vec y = at::vec::clamp(x, Vec(-9.02f), Vec(9.02f));
  const Vec e = expm1_in_range(y + y);
  return e / (e + Vec(2.f));
}

// The compiler would load a vector again for each use to save the register.
inline void keep_in_register(Vec& v) {
#if defined(CPU_CAPABILITY_AVX512)
  __m512 r = v;
  asm("" : "+v"(r));
  v = r;
#elif defined(CPU_CAPABILITY_AVX2)
  __m256 r = v;
  asm("" : "+x"(r));
  v = r;
#endif
}

// acc[m][n] += sum over i of a[m][i] * w[i][n]
template <int M, int N>
inline C10_ALWAYS_INLINE_ATTRIBUTE void multiply(
    const float* const* a, const float* w, int64_t k, Vec (&acc)[M][N]) {
  if constexpr (M == 1) {
    // Two sums, since N accumulators do not cover the latency of an addition.
    Vec odd[N];
    UNROLLED for (int n = 0; n < N; n++) odd[n] = Vec(0.f);
    int64_t i = 0;
    for (; i + 1 < k; i += 2) {
      const Vec a0(a[0][i]), a1(a[0][i + 1]);
      const float* b = w + i * N * LANES;
      UNROLLED for (int n = 0; n < N; n++) {
        acc[0][n] = at::vec::fmadd(a0, Vec::loadu(b + n * LANES), acc[0][n]);
        odd[n] = at::vec::fmadd(a1, Vec::loadu(b + (N + n) * LANES), odd[n]);
      }
    }
    UNROLLED for (int n = 0; n < N; n++) {
      if (i < k) {
        const Vec b = Vec::loadu(w + (i * N + n) * LANES);
        acc[0][n] = at::vec::fmadd(Vec(a[0][i]), b, acc[0][n]);
      }
      acc[0][n] = acc[0][n] + odd[n];
    }
  } else {
    for (int64_t i = 0; i < k; i++) {
      const float* b = w + i * N * LANES;
      if constexpr (N <= M) {
        Vec bs[N];
        UNROLLED for (int n = 0; n < N; n++) {
          bs[n] = Vec::loadu(b + n * LANES);
          keep_in_register(bs[n]);
        }
        UNROLLED for (int m = 0; m < M; m++) {
          const Vec x(a[m][i]);
          UNROLLED for (int n = 0; n < N; n++) acc[m][n] = at::vec::fmadd(x, bs[n], acc[m][n]);
        }
      } else {
        Vec x[M];
        UNROLLED for (int m = 0; m < M; m++) x[m] = Vec(a[m][i]);
        UNROLLED for (int n = 0; n < N; n++) {
          Vec bv = Vec::loadu(b + n * LANES);
          keep_in_register(bv);
          UNROLLED for (int m = 0; m < M; m++) acc[m][n] = at::vec::fmadd(x[m], bv, acc[m][n]);
        }
      }
    }
  }
}

template <int M, typename F>
inline void with_rows(int64_t m, F f) {
  if (m == M) {
    f(std::integral_constant<int, M>{});
  } else if constexpr (M > 1) {
    with_rows<M - 1>(m, f);
  }
}

// For each row r: finish(r, init(r) + a(r)[0:k] * w), where w is a packed panel.  Goes
// over k in blocks that stay in the L1 cache; sums wait in c(r) meanwhile.
template <int N, typename A, typename Init, typename C, typename Finish>
inline void panel_product(
    int64_t rows, int64_t k, const float* w, A a, Init init, C c, Finish finish) {
  constexpr int M = std::min<int64_t>(6, ACCUMULATORS / N);
  constexpr int64_t BLOCK = BLOCK_BYTES / (N * LANES * sizeof(float));
  int64_t k0 = 0;
  do {
    const int64_t block = std::min(k - k0, BLOCK);
    const bool is_last = k0 + block == k;
    const float* next = w + (k0 + block) * N * LANES;
    for (int64_t r0 = 0, m = 0; r0 < rows; r0 += m) {
      // One row alone is slow, so the last M + 1 rows make two even blocks.
      const int64_t left = rows - r0;
      m = left == M + 1 ? (M + 2) / 2 : std::min<int64_t>(left, M);
      if (rows >= 4 * M) {
        // Fetch a share of the next block.
        const int64_t share = BLOCK * N * LANES / rows;
        for (int64_t i = share * r0; i < share * (r0 + m); i += 16) {
          __builtin_prefetch(next + i, 0, 2);
        }
      }
      with_rows<M>(m, [&](auto rows_tag) {
        constexpr int R = decltype(rows_tag)::value;
        const float* as[R];
        Vec acc[R][N];
        UNROLLED for (int i = 0; i < R; i++) {
          as[i] = a(r0 + i) + k0;
          UNROLLED for (int n = 0; n < N; n++) acc[i][n] = Vec(0.f);
        }
        multiply<R, N>(as, w + k0 * N * LANES, block, acc);
        // Each block is summed for itself, which rounds less than one long sum.  The
        // copy of a row keeps the accumulators out of memory.
        UNROLLED for (int i = 0; i < R; i++) {
          Vec sums[N];
          if (k0 == 0) {
            init(r0 + i, sums);
          } else {
            UNROLLED for (int n = 0; n < N; n++) sums[n] = Vec::loadu(c(r0 + i) + n * LANES);
          }
          UNROLLED for (int n = 0; n < N; n++) sums[n] = sums[n] + acc[i][n];
          if (is_last) {
            finish(r0 + i, sums);
          } else {
            UNROLLED for (int n = 0; n < N; n++) sums[n].store(c(r0 + i) + n * LANES);
          }
        }
      });
    }
    k0 += block;
  } while (k0 < k);
}

// Row of a raw weight matrix that stands in lane v of vector n of panel p, or -1
inline int64_t raw_row(int64_t p, int64_t n, int64_t v) {
  const int64_t unit = (p * UNITS + n % UNITS) * LANES + v;
  return unit < HIDDEN ? n / UNITS * HIDDEN + unit : -1;
}

// The same as panel_product for weights as in the module, w[rows][k].
template <int N, typename A, typename Init, typename C, typename Finish, typename Row>
inline void raw_product(
    int64_t rows, int64_t k, const float* w, A a, Init init, C c, Finish finish, Row row) {
  for (int64_t r = 0; r < rows; r++) {
    Vec acc[N];
    init(r, acc);
    const float* x = a(r);
    for (int64_t n = 0; n < N; n++) {
      float sums[LANES];
      acc[n].store(sums);
      for (int64_t v = 0; v < LANES && k > 0; v++) {
        const int64_t i = row(n, v);
        if (i < 0) break;
        Vec sum(0.f);
        int64_t j = 0;
        for (; j + LANES <= k; j += LANES) {
          sum = at::vec::fmadd(Vec::loadu(w + i * k + j), Vec::loadu(x + j), sum);
        }
        for (; j < k; j++) sums[v] += w[i * k + j] * x[j];
        sums[v] += at::vec::vec_reduce_all<float>([](Vec& l, Vec& m) { return l + m; }, sum);
      }
      acc[n] = Vec::loadu(sums);
    }
    finish(r, acc);
  }
}

struct Weights {  // of one direction
  const float *w_ih, *w_hh, *b_ih, *b_hh, *w_hr;  // only if RAW
  const float* packed;  // null: multiply with the raw weights
  const float* biases;  // packed
};

struct Range {
  int64_t begin, end;
};

inline Range part(int64_t n, int64_t parts, int64_t i) {
  return {n * i / parts, n * (i + 1) / parts};
}

// Packs as rnn_pack_weights does; without `packed` only the biases.
void pack(const Weights& w, float* packed, float* packed_biases, Range panels, Range projections) {
  for (int64_t p = panels.begin; p < panels.end; p++) {
    float* panel = packed + p * PANEL_SIZE;
    for (int64_t n = 0; n < WIDTH; n++) {
      for (int64_t v = 0; v < LANES; v++) {
        const int64_t row = raw_row(p, n, v);
        for (int64_t k = 0; packed && k < INPUT + OUTPUT; k++) {
          panel[(k * WIDTH + n) * LANES + v] = row < 0 ? 0.f
              : k < INPUT ? w.w_ih[row * INPUT + k] : w.w_hh[row * OUTPUT + k - INPUT];
        }
        const bool apart = MODE == GRU && n == 2;
        const float b_ih = HAS_BIASES && row >= 0 ? w.b_ih[row] : 0.f;
        const float b_hh = HAS_BIASES && row >= 0 ? w.b_hh[row] : 0.f;
        float* biases = packed_biases + (p * BIASES * WIDTH + n) * LANES + v;
        biases[0] = apart ? b_ih : b_ih + b_hh;
        if (BIASES == 2) biases[WIDTH * LANES] = b_hh;
      }
    }
  }
  for (int64_t q = projections.begin; packed && q < projections.end; q++) {
    float* panel = packed + PROJECT_OFFSET + q * HIDDEN * PROJECT_WIDTH * LANES;
    for (int64_t i = 0; i < PROJECT_WIDTH * LANES; i++) {
      const int64_t row = q * PROJECT_WIDTH * LANES + i;
      for (int64_t k = 0; k < HIDDEN; k++) {
        panel[k * PROJECT_WIDTH * LANES + i] = row < OUTPUT ? w.w_hr[row * HIDDEN + k] : 0.f;
      }
    }
  }
}

// Of the threads that share the panels of some rows.  Yields when a thread is late,
// since there may be more threads than cores.
struct Barrier {
  alignas(64) std::atomic<int64_t> arrived{0};
  alignas(64) std::atomic<int64_t> round{0};

  void wait(int64_t threads) {
    if (threads == 1) return;
    const int64_t now = round.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      return;
    }
    for (int64_t spins = 0; round.load(std::memory_order_acquire) == now; spins++) {
      if (spins < 1000) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        std::this_thread::yield();
      }
    }
  }
};

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

inline Buffer allocate(int64_t floats) {
  const int64_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
  Buffer buffer(static_cast<float*>(std::aligned_alloc(64, bytes)));
  if (!buffer && bytes > 0) throw std::bad_alloc();
  return buffer;
}

// How threads divide the work: among directions, rows of the batch, and panels
struct Split {
  int64_t directions, rows, panels;

  Split(int64_t threads, int64_t steps, int64_t batch) {
    const int64_t call = DIRECTIONS * steps * batch * GATES * HIDDEN * (INPUT + OUTPUT);
    threads = std::max<int64_t>(1, std::min(threads, call / MIN_CALL_WORK));
    directions = threads >= DIRECTIONS ? DIRECTIONS : 1;
    threads /= directions;
    rows = std::max<int64_t>(1, std::min(threads, batch / MIN_THREAD_ROWS));
    const int64_t work = batch / rows * GATES * HIDDEN * OUTPUT;
    panels = std::max<int64_t>(1, std::min({threads / rows, PANELS, work / MIN_STEP_WORK}));
  }

  int64_t threads() const {
    return directions * rows * panels;
  }
};

struct Direction {
  Weights weights;
  const float *hx, *cx;  // null: zeros
  float *out, *hy, *cy;  // out is where this direction starts in a row
  float* cell;  // (B, HIDDEN), before the projection
  bool reverse;
};

// The rows and panels of one thread, over all time steps
void run(
    const Direction& d, const float* x, int64_t x_time, int64_t x_batch, int64_t T, int64_t B,
    Range batch, Range panels, Range projections, Barrier& barrier, int64_t threads) {
  const int64_t rows = batch.end - batch.begin;
  const int64_t row_size = (panels.end - panels.begin) * SLOTS * LANES;
  const int64_t chunk_rows = std::max<int64_t>(CHUNK_ROWS, CHUNK_BYTES / 4 / std::max<int64_t>(1, row_size));
  const int64_t chunk = std::min(T, std::max<int64_t>(1, chunk_rows / std::max<int64_t>(1, rows)));
  // A panel's gates follow each other; the projection needs room for its sums.
  const int64_t sums_size = PROJECT ? rows * PROJECT_WIDTH * LANES : 0;
  const Buffer buffer = allocate(chunk * rows * row_size + sums_size);
  float* const gates = buffer.get();
  float* const sums = gates + chunk * rows * row_size;
  constexpr int64_t out_batch = DIRECTIONS * OUTPUT;
  const int64_t out_time = B * out_batch;
  const Weights& w = d.weights;
  const bool packed = !RAW || w.packed;
  auto time = [&](int64_t t) { return d.reverse ? T - 1 - t : t; };

  for (int64_t t0 = 0; t0 < T; t0 += chunk) {
    const int64_t steps = std::min(chunk, T - t0);
    for (int64_t p = panels.begin; p < panels.end; p++) {
      const float* biases = w.biases + p * BIASES * WIDTH * LANES;
      float* panel_gates = gates + (p - panels.begin) * chunk * rows * SLOTS * LANES;
      auto c = [&](int64_t r) { return panel_gates + r * SLOTS * LANES; };
      auto a = [&](int64_t r) {
        return x + time(t0 + r / rows) * x_time + (batch.begin + r % rows) * x_batch;
      };
      auto init = [&](int64_t, Vec (&acc)[WIDTH]) {
        UNROLLED for (int n = 0; n < WIDTH; n++) acc[n] = Vec::loadu(biases + n * LANES);
      };
      auto finish = [&](int64_t r, Vec (&acc)[WIDTH]) {
        UNROLLED for (int n = 0; n < WIDTH; n++) {
          acc[n].store(c(r) + (MODE == GRU && n == 2 ? 3 : n) * LANES);
        }
        if constexpr (MODE == GRU) {
          Vec::loadu(biases + (WIDTH + 2) * LANES).store(c(r) + 2 * LANES);
        }
      };
      if (packed) {
        panel_product<WIDTH>(steps * rows, INPUT, w.packed + p * PANEL_SIZE, a, init, c, finish);
      } else {
        raw_product<WIDTH>(steps * rows, INPUT, w.w_ih, a, init, c, finish,
            [&](int64_t n, int64_t v) { return raw_row(p, n, v); });
      }
    }

    for (int64_t t = t0; t < t0 + steps; t++) {
      float* out_now = d.out + time(t) * out_time;
      const float* h = t == 0 ? d.hx : d.out + time(t - 1) * out_time;
      const int64_t h_batch = t == 0 ? OUTPUT : out_batch;
      const float* cell_before = t == 0 ? d.cx : d.cy;
      float* y = PROJECT ? d.cell : out_now;
      constexpr int64_t y_batch = PROJECT ? HIDDEN : out_batch;
      for (int64_t p = panels.begin; p < panels.end; p++) {
        float* step_gates = gates +
            ((p - panels.begin) * chunk + t - t0) * rows * SLOTS * LANES;
        auto c = [&](int64_t r) { return step_gates + r * SLOTS * LANES; };
        auto a = [&](int64_t r) { return h + (batch.begin + r) * h_batch; };
        auto init = [&](int64_t r, Vec (&acc)[WIDTH]) {
          UNROLLED for (int n = 0; n < WIDTH; n++) acc[n] = Vec::loadu(c(r) + n * LANES);
        };
        // Applies the gates.  `whole`: all units of the panel exist.
        auto update = [&](auto whole, int64_t r, Vec (&acc)[WIDTH]) {
          const int64_t b = batch.begin + r;
          UNROLLED for (int u = 0; u < UNITS; u++) {
            const int64_t unit = (p * UNITS + u) * LANES;
            const int64_t count = std::min<int64_t>(LANES, HIDDEN - unit);
            if (!decltype(whole)::value && count <= 0) break;
            auto load = [&](const float* from) {
              if (!from) return Vec(0.f);
              from += unit;
              return decltype(whole)::value ? Vec::loadu(from) : Vec::loadu(from, count);
            };
            auto store = [&](Vec v, float* to) {
              if (decltype(whole)::value) {
                v.store(to + unit);
              } else {
                v.store(to + unit, count);
              }
            };
            Vec hidden;
            if constexpr (MODE == LSTM) {
              Vec cell = load(cell_before ? cell_before + b * HIDDEN : nullptr);
              cell = sigmoid(acc[1]) * cell + sigmoid(acc[0]) * tanh(acc[2]);
              store(cell, d.cy + b * HIDDEN);
              hidden = sigmoid(acc[3]) * tanh(cell);
            } else if constexpr (MODE == GRU) {
              const Vec input_part = Vec::loadu(c(r) + 3 * LANES);
              const Vec fresh = tanh(at::vec::fmadd(sigmoid(acc[0]), acc[2], input_part));
              const Vec before = load(h ? h + b * h_batch : nullptr);
              hidden = at::vec::fmadd(sigmoid(acc[1]), before - fresh, fresh);
            } else if constexpr (MODE == RNN_TANH) {
              hidden = tanh(acc[u]);
            } else {
              hidden = at::vec::clamp_min(acc[u], Vec(0.f));
            }
            store(hidden, y + b * y_batch);
          }
        };
        auto product = [&](auto whole) {
          auto finish = [&](int64_t r, Vec (&acc)[WIDTH]) { update(whole, r, acc); };
          const int64_t k = h ? OUTPUT : 0;
          if (packed) {
            const float* panel = w.packed + p * PANEL_SIZE + INPUT * WIDTH * LANES;
            panel_product<WIDTH>(rows, k, panel, a, init, c, finish);
          } else {
            raw_product<WIDTH>(rows, k, w.w_hh, a, init, c, finish,
                [&](int64_t n, int64_t v) { return raw_row(p, n, v); });
          }
        };
        if ((p + 1) * UNITS * LANES <= HIDDEN) {
          product(std::true_type{});
        } else if constexpr (HIDDEN % (UNITS * LANES) != 0) {
          product(std::false_type{});
        }
      }
      barrier.wait(threads);

      if constexpr (PROJECT) {
        for (int64_t q = projections.begin; q < projections.end; q++) {
          auto c = [&](int64_t r) { return sums + r * PROJECT_WIDTH * LANES; };
          auto a = [&](int64_t r) { return d.cell + (batch.begin + r) * HIDDEN; };
          auto init = [&](int64_t, Vec (&acc)[PROJECT_WIDTH]) {
            UNROLLED for (int n = 0; n < PROJECT_WIDTH; n++) acc[n] = Vec(0.f);
          };
          auto finish = [&](int64_t r, Vec (&acc)[PROJECT_WIDTH]) {
            UNROLLED for (int n = 0; n < PROJECT_WIDTH; n++) {
              const int64_t unit = (q * PROJECT_WIDTH + n) * LANES;
              const int64_t count = std::min<int64_t>(LANES, OUTPUT - unit);
              if (count > 0) acc[n].store(out_now + (batch.begin + r) * out_batch + unit, count);
            }
          };
          if (packed) {
            const float* panel = w.packed + PROJECT_OFFSET + q * HIDDEN * PROJECT_WIDTH * LANES;
            panel_product<PROJECT_WIDTH>(rows, HIDDEN, panel, a, init, c, finish);
          } else {
            raw_product<PROJECT_WIDTH>(rows, HIDDEN, w.w_hr, a, init, c, finish,
                [&](int64_t n, int64_t v) {
                  const int64_t i = (q * PROJECT_WIDTH + n) * LANES + v;
                  return i < OUTPUT ? i : -1;
                });
          }
        }
        barrier.wait(threads);
      }
    }
  }
}

#undef UNROLLED
}  // namespace {{kernel.kernel_name}}_rnn

extern "C" {{export_declaration}}
{{kernel.def_kernel(inputs=inputs, outputs=outputs)}}
{
  using namespace {{kernel.kernel_name}}_rnn;
  const int64_t T = {{kernel.size(x, 0)}};
  const int64_t B = {{kernel.size(x, 1)}};
  if (B == 0) return;
  // An output that nothing reads is not there, but the kernel works in two of them.
{%- if "out" in outputs %}
  float* const out_all = out;
{%- else %}
  const Buffer out_buffer = allocate(T * B * DIRECTIONS * OUTPUT);
  float* const out_all = out_buffer.get();
{%- endif %}
{%- if "cy" in outputs %}
  float* const cy_all = cy;
{%- else %}
  const Buffer cy_buffer = allocate(MODE == LSTM ? DIRECTIONS * B * HIDDEN : 0);
  float* const cy_all = cy_buffer.get();
{%- endif %}
  const Buffer cells = allocate(PROJECT ? DIRECTIONS * B * HIDDEN : 0);
  const bool pack_now = RAW && T * B >= MIN_PACK_ROWS;
  const int64_t pack_size = pack_now ? PACKED_SIZE : PROJECT_OFFSET - BIAS_OFFSET;
  const Buffer pack_buffer = allocate(RAW ? DIRECTIONS * pack_size : 0);
  Direction directions[DIRECTIONS] = {
{%- for i in range(template.reverse|length) %}
      {{ '{{' }}{{template.weight_pointers(kernel, i)}}},
       {{template.pointer(kernel, template.hx, i)}},
       {{template.pointer(kernel, template.cx, i)}},
       out_all + {{i}} * OUTPUT,
       {{"hy + %d * B * OUTPUT" % i if "hy" in outputs else "nullptr"}},
       cy_all + {{i}} * B * HIDDEN,
       cells.get() + {{i}} * B * HIDDEN,
       REVERSE[{{i}}]},
{%- endfor %}
  };
  float* packed[DIRECTIONS];
  float* biases[DIRECTIONS];
  for (int64_t i = 0; i < DIRECTIONS; i++) {
    Weights& w = directions[i].weights;
    if (RAW) {
      float* const start = pack_buffer.get() + i * pack_size;
      packed[i] = pack_now ? start : nullptr;
      biases[i] = pack_now ? start + BIAS_OFFSET : start;
      w.packed = packed[i];
      w.biases = biases[i];
    } else {
      w.biases = w.packed + BIAS_OFFSET;
    }
  }

  const Split wanted({{max_threads}}, T, B);
  const std::unique_ptr<Barrier[]> barriers(new Barrier[wanted.threads()]);
#pragma omp parallel num_threads(wanted.threads()) if (wanted.threads() > 1)
  {
    const int64_t team = omp_get_num_threads();  // may be fewer than wanted
    const int64_t thread = omp_get_thread_num();
    if (RAW) {
      for (int64_t i = 0; i < DIRECTIONS; i++) {
        pack(directions[i].weights, packed[i], biases[i], part(PANELS, team, thread),
             part(PROJECT_PANELS, team, thread));
      }
#pragma omp barrier
    }
    const Split split(team, T, B);
    const int64_t panel_part = thread % split.panels;
    const int64_t group = thread / split.panels;
    const Range rows = part(B, split.rows, group % split.rows);
    const int64_t first = thread < split.threads() ? group / split.rows : DIRECTIONS;
    for (int64_t i = first; i < DIRECTIONS; i += split.directions) {
      const Direction& d = directions[i];
      run(d, &({{kernel.index(x, [0, 0, 0])}}), {{kernel.stride(x, 0)}}, {{kernel.stride(x, 1)}}, T, B, rows,
          part(PANELS, split.panels, panel_part),
          part(PROJECT_PANELS, split.panels, panel_part), barriers[group], split.panels);
      if (d.hy && panel_part == 0) {
        const float* last = d.out + (d.reverse ? 0 : T - 1) * B * DIRECTIONS * OUTPUT;
        for (int64_t b = rows.begin; b < rows.end; b++) {
          std::copy_n(last + b * DIRECTIONS * OUTPUT, OUTPUT, d.hy + b * OUTPUT);
        }
      }
    }
  }
}
"""


class CppRnnTemplate(CppTemplate):
    """Kernel of ``torch_rnn::rnn_layers``; see there for the arguments."""

    def __init__(
        self,
        input_nodes: list[ir.IRNode],
        layout: ir.Layout,
        x: ir.IRNode,
        weights: list[list[ir.IRNode]],
        hx: list[ir.IRNode],
        cx: list[ir.IRNode],
        mode: str,
        hidden_size: int,
        output_size: int,
        has_biases: bool,
        reverse: list[bool],
        lanes: int,
    ) -> None:
        super().__init__("rnn", input_nodes, layout, parallel_num_threads())
        self.x = x
        self.weights = weights
        self.hx = hx
        self.cx = cx
        self.mode = mode
        self.input_size = int(x.get_size()[2])
        self.hidden_size = hidden_size
        self.output_size = output_size
        self.has_biases = has_biases
        self.reverse = reverse
        self.lanes = lanes
        self.gates = GATES[mode]
        self.units = panel_units(mode, hidden_size, vector_lanes())

    @staticmethod
    def pointer(kernel: CppTemplateKernel, nodes: list[ir.IRNode], i: int) -> str:
        if not nodes:
            return "nullptr"
        index = kernel.index(nodes[i], [0] * len(nodes[i].get_size()))  # type: ignore[arg-type]
        return f"&({index})"

    def weight_pointers(self, kernel: CppTemplateKernel, direction: int) -> str:
        """The members of ``Weights``."""
        weights = self.weights[direction]
        pointers = [self.pointer(kernel, weights, i) for i in range(len(weights))]
        null = "nullptr"
        if self.lanes:
            return ", ".join([null] * 5 + pointers + [null])
        w_ih, w_hh, *rest = pointers
        b_ih, b_hh = (rest.pop(0), rest.pop(0)) if self.has_biases else (null, null)
        w_hr = rest.pop() if rest else null
        return ", ".join([w_ih, w_hh, b_ih, b_hh, w_hr, null, null])

    def render(  # type: ignore[override]
        self, kernel: CppTemplateKernel, template_buffer_node: ir.CppTemplateBuffer
    ) -> str:
        def used(buffers):
            return {
                name: buffer
                for name, buffer in zip(("out", "hy", "cy"), buffers)
                if buffer.get_name() not in V.graph.removed_buffers
            }

        nodes = [self.x, *(w for ws in self.weights for w in ws), *self.hx, *self.cx]
        dynamic = config.cpp.threads < 1 or config.cpp.dynamic_threads
        return self._template_from_string(RNN_TEMPLATE).render(
            template=self,
            kernel=kernel,
            export_declaration=get_export_declaration(),
            x=self.x,
            inputs={f"in{i}": node for i, node in enumerate(nodes)},
            outputs=used(template_buffer_node.outputs),
            max_threads="omp_get_max_threads()" if dynamic else self.num_threads,
        )

    def create(self, layouts: Sequence[ir.Layout]) -> list[ir.Buffer]:
        """Put the kernel into the graph; ``layouts`` are those of its outputs."""

        def make_kernel_render(
            template_node, flag_template_buffer_has_other_users, epilogue_nodes=None
        ):
            assert not epilogue_nodes
            kernel = CppTemplateKernel(
                kernel_name=str(Placeholder.KERNEL_NAME), num_threads=self.num_threads
            )
            return kernel, lambda: kernel.render(
                self, template_buffer_node=template_node
            )

        buffer = ir.CppTemplateBuffer(
            layout=ir.MultiOutputLayout(device=self.layout.device),  # type: ignore[arg-type]
            inputs=self.input_nodes,
            make_kernel_render=make_kernel_render,
            template=self,  # type: ignore[arg-type]
            choice=None,
        )
        buffer.allow_epilogue_fusion = False
        buffer.outputs = [
            ir.MultiOutput(layout, buffer, [(tuple, i)])
            for i, layout in enumerate(layouts)
        ]
        return buffer.outputs
