// The Python module: handles to matrices and blocks, made at load, and one call a block a step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "blocks_of_model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace powerinfer {
namespace {

using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsInOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

constexpr size_t kMaxDimension = 1u << 30;

FloatsOut make_floats(size_t rows, size_t cols) {
    auto* data = new float[rows * cols];
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return FloatsOut(data, {rows, cols}, owner);
}

// A weight that keeps its array alive.
struct OwnedMatrix {
    Bytes2 data;
    std::optional<Floats1> bias;
    Buffer<uint8_t> packed;
    Matrix matrix;

    OwnedMatrix(Runtime& runtime, int type, Bytes2 rows, int64_t n_cols, std::optional<Floats1> bias_in, bool pack,
                bool transposed)
        : data(std::move(rows)), bias(std::move(bias_in)) {
        const bool known = type >= 0 && type < kTypeSlots && runtime.kernels.types[type].block_size > 0;
        if (!known) throw std::invalid_argument("no kernels for this tensor type");
        const TypeKernels& kernels = runtime.kernels.types[type];
        if (n_cols <= 0 || static_cast<size_t>(n_cols) > kMaxDimension || data.shape(0) > kMaxDimension ||
            n_cols % kernels.block_size != 0 ||
            data.shape(1) != static_cast<size_t>(n_cols / kernels.block_size) * kernels.block_bytes) {
            throw std::invalid_argument("the array does not hold rows of this many elements");
        }
        const size_t n_bias = transposed ? static_cast<size_t>(n_cols) : data.shape(0);
        if (bias && bias->shape(0) != n_bias) throw std::invalid_argument("the bias has another length");
        matrix.transposed = transposed;
        matrix.data = data.data();
        matrix.bias = bias ? bias->data() : nullptr;
        matrix.kernels = &kernels;
        matrix.n_rows = static_cast<int>(data.shape(0));
        matrix.n_cols = static_cast<int>(n_cols);
        matrix.row_bytes = data.shape(1);
        if (pack && kernels.pack != nullptr) pack_rows(runtime);
    }

    void pack_rows(Runtime& runtime) {
        const int n_groups = matrix.n_rows / kPackedRows;
        uint8_t* to = packed.reserve(static_cast<size_t>(n_groups) * kPackedRows * matrix.row_bytes);
        nb::gil_scoped_release released;
        const std::lock_guard<std::mutex> lock(runtime.mutex);
        runtime.run(n_groups, [&](Region& region) {
            region.for_each(n_groups, 16, [&](int64_t begin, int64_t end) {
                for (int64_t g = begin; g < end; g++) {
                    const uint8_t* group[kPackedRows];
                    for (int r = 0; r < kPackedRows; r++) group[r] = matrix.row(g * kPackedRows + r);
                    matrix.kernels->pack(group, matrix.n_cols, to + g * kPackedRows * matrix.row_bytes);
                }
            });
        });
        matrix.packed = to;
        matrix.n_packed = n_groups * kPackedRows;
    }
};

struct OwnedNorm {
    Floats1 weight;
    std::optional<Floats1> bias;
    Norm norm;

    OwnedNorm(Floats1 weight_in, std::optional<Floats1> bias_in, float eps, bool layer)
        : weight(std::move(weight_in)), bias(std::move(bias_in)) {
        if (bias && bias->shape(0) != weight.shape(0)) throw std::invalid_argument("the bias has another length");
        norm = {weight.data(), bias ? bias->data() : nullptr, eps, layer};
    }
    void check(int n) const {
        if (weight.shape(0) != static_cast<size_t>(n)) throw std::invalid_argument("the norm has another length");
    }
};

Matrix view(const OwnedMatrix* owned) { return owned ? owned->matrix : Matrix{}; }

// Of n elements.
Norm view(const OwnedNorm* owned, int n) {
    if (owned == nullptr) return {};
    owned->check(n);
    return owned->norm;
}

Runtime* make_runtime(const std::string& isa, int n_threads, int n_threads_batch) {
    const Kernels* kernels = isa.empty() ? best_kernels() : find_kernels(isa.c_str());
    if (kernels == nullptr) throw std::invalid_argument("this processor has no such instruction set: " + isa);
    if (n_threads < 1 || n_threads_batch < 1 || n_threads > 4096 || n_threads_batch > 4096) {
        throw std::invalid_argument("the number of threads must be from 1 to 4096");
    }
    return new Runtime(*kernels, n_threads, n_threads_batch);
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const char* name : {"portable", "neon", "avx2", "avx512"}) {
        if (find_kernels(name)) names.emplace_back(name);
    }
    return names;
}

Hidden* embed_batch(Runtime& runtime, const OwnedMatrix& token_embd, float scale, const OwnedMatrix* position_embd,
                    const Ints& tokens, const Ints& positions, const Ints& slots) {
    const size_t n = tokens.shape(0);
    if (n == 0 || n > kMaxDimension || positions.shape(0) != n || slots.shape(0) != n) {
        throw std::invalid_argument("a batch needs as many positions and slots as tokens, and at least one");
    }
    if (position_embd && position_embd->matrix.n_cols != token_embd.matrix.n_cols) {
        throw std::invalid_argument("the embedding of positions has another width");
    }
    auto hidden = std::make_unique<Hidden>(
        static_cast<int>(n), token_embd.matrix.n_cols, std::vector<int32_t>(positions.data(), positions.data() + n),
        std::vector<int32_t>(slots.data(), slots.data() + n));
    nb::gil_scoped_release released;
    embed(runtime, token_embd.matrix, scale, view(position_embd), tokens.data(), *hidden);
    return hidden.release();
}

Hidden* copy_hidden(const Hidden& x) {
    auto y = std::make_unique<Hidden>(x.n_tokens, x.n_embd, x.positions, x.slots);
    std::copy_n(x.values.data(), static_cast<size_t>(x.n_tokens) * x.n_embd, y->values.data());
    return y.release();
}

Hidden* hidden_from(const Floats2& values, const Ints& positions, const Ints& slots) {
    const size_t n = values.shape(0);
    if (n == 0 || n > kMaxDimension || values.shape(1) == 0 || values.shape(1) > kMaxDimension ||
        positions.shape(0) != n || slots.shape(0) != n) {
        throw std::invalid_argument("a hidden state needs as many positions and slots as rows, and at least one");
    }
    auto x = std::make_unique<Hidden>(static_cast<int>(n), static_cast<int>(values.shape(1)),
                                      std::vector<int32_t>(positions.data(), positions.data() + n),
                                      std::vector<int32_t>(slots.data(), slots.data() + n));
    std::copy_n(values.data(), n * values.shape(1), x->values.data());
    return x.release();
}

FloatsOut hidden_values(const Hidden& x) {
    FloatsOut out = make_floats(x.n_tokens, x.n_embd);
    std::copy_n(x.values.data(), static_cast<size_t>(x.n_tokens) * x.n_embd, out.data());
    return out;
}

FloatsOut logits(Runtime& runtime, const OwnedNorm& norm, const OwnedMatrix& output, const Hidden& x,
                 const Ints& outputs) {
    norm.check(x.n_embd);
    if (output.matrix.n_cols != x.n_embd) throw std::invalid_argument("the head has another width");
    FloatsOut out = make_floats(outputs.shape(0), output.matrix.n_rows);
    nb::gil_scoped_release released;
    if (outputs.shape(0) > 0) {
        head(runtime, norm.norm, output.matrix, x, outputs.data(), static_cast<int>(outputs.shape(0)), out.data());
    }
    return out;
}

// x (n_tokens, n_cols) times the matrix's rows: what the blocks do inside, for tests and benchmarks.
FloatsOut multiply(Runtime& runtime, const OwnedMatrix& w, const Floats2& x) {
    const int n_tokens = static_cast<int>(x.shape(0));
    if (x.shape(1) != static_cast<size_t>(w.matrix.n_cols)) throw std::invalid_argument("x has another width");
    FloatsOut out = make_floats(n_tokens, w.matrix.n_rows);
    nb::gil_scoped_release released;
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    ActivationBuffer& buffer = runtime.scratch.normed;
    buffer.reserve(n_tokens, w.matrix.n_cols, w.matrix.takes_rounded());
    const auto body = [&](Region& region) {
        region.for_each(n_tokens, 1, [&](int64_t t, int64_t) {
            buffer.round(runtime.kernels, static_cast<int>(t), x.data() + t * w.matrix.n_cols);
        });
        region.barrier();
        runtime.matmul(region, w.matrix, buffer.view(x.data()), n_tokens, out.data(), w.matrix.n_rows);
    };
    runtime.run(n_tokens, body);
    return out;
}

// GB/s at which all threads together read `nbytes` of memory that no cache holds, the best of `repeats`.
double read_bandwidth(Runtime& runtime, size_t nbytes, int repeats) {
    nb::gil_scoped_release released;
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    Buffer<uint64_t> buffer;
    const int64_t n = static_cast<int64_t>(nbytes / sizeof(uint64_t));
    uint64_t* data = buffer.reserve(n);
    std::fill_n(data, n, 1);  // pages never written to are all the same one
    double best = 0;
    for (int i = 0; i < repeats; i++) {
        std::atomic<uint64_t> total{0};
        const auto start = std::chrono::steady_clock::now();
        runtime.run(1, [&](Region& region) {
            region.for_each(n, 1 << 15, [&](int64_t begin, int64_t end) {
                uint64_t sum = 0;
                for (int64_t j = begin; j < end; j++) sum += data[j];
                total += sum;
            });
        });
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (total != static_cast<uint64_t>(n)) throw std::runtime_error("memory does not hold what was written to it");
        best = std::max(best, static_cast<double>(n) * sizeof(uint64_t) / seconds / 1e9);
    }
    return best;
}

// The matrix as float32.
FloatsOut dequantize(const OwnedMatrix& w) {
    FloatsOut out = make_floats(w.matrix.n_rows, w.matrix.n_cols);
    for (int r = 0; r < w.matrix.n_rows; r++) {
        w.matrix.kernels->dequantize(w.matrix.row(r), 0, out.data() + static_cast<size_t>(r) * w.matrix.n_cols,
                                     w.matrix.n_cols);
    }
    return out;
}

}  // namespace
}  // namespace powerinfer

NB_MODULE(_kernels, m) {
    using namespace powerinfer;

    m.doc() = "C++ kernels of the native backend.";
    m.def("instruction_sets", &instruction_sets, "Names of the instruction sets that this processor runs.");

    nb::class_<Runtime>(m, "Runtime", "Threads, kernels of one instruction set ('': the best), and scratch memory.")
        .def(nb::new_(&make_runtime), "isa"_a, "n_threads"_a, "n_threads_batch"_a)
        .def_prop_ro("isa", [](const Runtime& r) { return std::string(r.kernels.name); })
        .def_ro("n_threads", &Runtime::n_threads)
        .def_ro("n_threads_batch", &Runtime::n_threads_batch)
        .def("supports", [](const Runtime& r, int type) {
            return type >= 0 && type < kTypeSlots && r.kernels.types[type].block_size > 0;
        }, "type"_a, "Whether there are kernels for the GGML type of this number.");

    nb::class_<OwnedMatrix>(m, "Matrix", "Rows of a quantized weight: uint8 (n_rows, row_bytes), kept, not copied.")
        .def(nb::init<Runtime&, int, Bytes2, int64_t, std::optional<Floats1>, bool, bool>(), "runtime"_a, "type"_a, "data"_a,
             "n_cols"_a, "bias"_a.none() = nb::none(), "pack"_a = false, "transposed"_a = false, nb::keep_alive<1, 2>(),
             "pack: also make a copy with rows interleaved, for a matrix that is always used whole.\n"
             "transposed: one row an input, so the bias has an element a column.")
        .def("dequantize", &dequantize, "float32 (n_rows, n_cols).");

    nb::class_<OwnedNorm>(m, "Norm", "RMSNorm, or LayerNorm if `layer`.")
        .def(nb::init<Floats1, std::optional<Floats1>, float, bool>(), "weight"_a, "bias"_a.none(), "eps"_a, "layer"_a);

    nb::class_<Hidden>(m, "Hidden", "Hidden state of a batch: float32 (n_tokens, n_embd).")
        .def(nb::new_(&hidden_from), "values"_a, "positions"_a, "slots"_a)
        .def_ro("n_tokens", &Hidden::n_tokens)
        .def("copy", &copy_hidden)
        .def("numpy", &hidden_values, "A copy as an array.");

    nb::class_<KVCache>(m, "KVCache", "Keys and values of GGML types; heads: (n_head_kv, head_dim) of each layer.")
        .def("__init__",
             [](KVCache* self, const Runtime& runtime, int type_k, int type_v, int n_slots, int n_ctx,
                const std::vector<std::pair<int, int>>& heads) {
                 new (self) KVCache(runtime.kernels, type_k, type_v, n_slots, n_ctx, heads);
             },
             "runtime"_a, "type_k"_a, "type_v"_a, "n_slots"_a, "n_ctx"_a, "heads"_a, nb::keep_alive<1, 2>())
        .def_ro("n_slots", &KVCache::n_slots)
        .def_ro("n_ctx", &KVCache::n_ctx)
        .def_prop_ro("nbytes", &KVCache::nbytes);

    nb::enum_<Activation>(m, "Activation")
        .value("identity", Activation::Identity)
        .value("relu", Activation::Relu)
        .value("silu", Activation::Silu)
        .value("gelu", Activation::Gelu)
        .value("gelu_erf", Activation::GeluErf);

    nb::class_<AttentionBlock>(m, "Attention")
        .def("__init__",
             [](AttentionBlock* self, Runtime& runtime, const OwnedNorm& norm, const OwnedMatrix& q,
                const OwnedMatrix& k, const OwnedMatrix& v, const OwnedMatrix& output, const OwnedNorm* q_norm,
                const OwnedNorm* k_norm, const OwnedNorm* post_norm, int layer, int n_head, int n_head_kv, int head_dim,
                float scale, int window, std::vector<double> frequencies, float magnitude, bool neox) {
                 const int n_embd = q.matrix.n_cols;
                 new (self) AttentionBlock(
                     runtime, {layer, n_head, n_head_kv, head_dim, window, scale, {std::move(frequencies), magnitude, neox},
                               view(&norm, n_embd), q.matrix, k.matrix, v.matrix, output.matrix,
                               view(q_norm, head_dim), view(k_norm, head_dim), view(post_norm, n_embd)});
             },
             "runtime"_a, "norm"_a, "q"_a, "k"_a, "v"_a, "output"_a, "q_norm"_a.none(), "k_norm"_a.none(),
             "post_norm"_a.none(), "layer"_a, "n_head"_a, "n_head_kv"_a, "head_dim"_a, "scale"_a, "window"_a,
             "frequencies"_a, "magnitude"_a, "neox"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
             nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>())
        .def("forward", &AttentionBlock::forward, "x"_a, "residual"_a, "cache"_a,
             nb::call_guard<nb::gil_scoped_release>());

    nb::class_<FeedForwardBlock>(m, "FeedForward")
        .def("__init__",
             [](FeedForwardBlock* self, Runtime& runtime, const OwnedNorm& norm, const OwnedMatrix* gate,
                const OwnedMatrix& up, const OwnedMatrix& down, const OwnedMatrix* fc1, const OwnedMatrix* fc2,
                const OwnedNorm* post_norm, Activation activation, float activation_threshold,
                Activation up_activation, float threshold) {
                 const int n_embd = up.matrix.n_cols;
                 new (self) FeedForwardBlock(runtime, view(&norm, n_embd), view(gate), up.matrix, down.matrix, activation, activation_threshold, up_activation, view(fc1), view(fc2),
                                             threshold, view(post_norm, n_embd));
             },
             "runtime"_a, "norm"_a, "gate"_a.none(), "up"_a, "down"_a, "fc1"_a.none(), "fc2"_a.none(),
             "post_norm"_a.none(), "activation"_a, "activation_threshold"_a, "up_activation"_a,
             "threshold"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
             nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
             nb::keep_alive<1, 9>())
        .def("count_neurons", [](FeedForwardBlock& b) { b.fired_of.assign(b.n_ff(), 0); },
             "From now on, count for how many tokens each neuron fires.")
        .def("neuron_counts", [](const FeedForwardBlock& b) { return b.fired_of; },
             "Those counts, n_ff of them; none before they are asked for.")
        .def("add_neurons",
             [](FeedForwardBlock& self, const Floats2& normed, const Bytes2& mask, FloatsInOut out) {
                 if (normed.shape(1) != static_cast<size_t>(self.n_embd()) || mask.shape(0) != normed.shape(0) ||
                     mask.shape(1) != static_cast<size_t>(self.n_ff()) || out.shape(0) != normed.shape(0) ||
                     out.shape(1) != normed.shape(1) || normed.shape(0) == 0 || normed.shape(0) > kMaxDimension) {
                     throw std::invalid_argument("feed-forward: the arrays do not fit each other");
                 }
                 nb::gil_scoped_release released;
                 self.add_neurons(normed.data(), mask.data(), static_cast<int>(normed.shape(0)), out.data());
             },
             "normed"_a, "mask"_a, "out"_a,
             "out (n_tokens, n_embd) += what the neurons give that mask, uint8 (n_tokens, n_ff), names; without biases.")
        .def("forward", &FeedForwardBlock::forward, "x"_a, "residual"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_rw(
            "counts",
            [](const FeedForwardBlock& b) {
                return std::vector<int64_t>{b.counts.tokens, b.counts.predicted, b.counts.fired};
            },
            [](FeedForwardBlock& b, const std::vector<int64_t>& c) { b.counts = {c.at(0), c.at(1), c.at(2)}; },
            "tokens, neurons predicted, neurons fired since it was last set.");

    m.def("embed", &embed_batch, "runtime"_a, "token_embd"_a, "scale"_a, "position_embd"_a.none(), "tokens"_a,
          "positions"_a, "slots"_a, "Hidden state of a batch from rows of the embeddings.");
    m.def("logits", &logits, "runtime"_a, "norm"_a, "output"_a, "x"_a, "outputs"_a,
          "output · norm(x) of the rows `outputs`: float32 (n_outputs, n_vocab).");
    m.def("read_bandwidth", &read_bandwidth, "runtime"_a, "nbytes"_a, "repeats"_a = 5,
          "GB/s at which all threads together read memory, the best of `repeats`.");
    m.def("multiply", &multiply, "runtime"_a, "matrix"_a, "x"_a, "x W^T: float32 (n_tokens, n_rows).");
}
