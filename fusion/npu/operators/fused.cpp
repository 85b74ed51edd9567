// Operators that do in one call what takes PyTorch ten: the CPU's counterpart of a card's fused kernels.
//
// Tensors are float32 and rows are independent: a row's result does not depend on the others of its batch. No gradients.
// Names of dimensions as in the Python code: N rows, D hidden, H query heads, K key/value heads, C channels of a head,
// E experts, k experts of a row, I inner size of an expert.
#include "vector.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace fused {
namespace {

const float* floats(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, "rlfusion: expected float32, got ", tensor.scalar_type());
  return tensor.const_data_ptr<float>();
}

const int64_t* integers(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.is_contiguous(), "rlfusion: expected contiguous int64");
  return tensor.const_data_ptr<int64_t>();
}

const float* contiguous(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "rlfusion: expected a contiguous tensor");
  return floats(tensor);
}

// RMSNorm

FUSED_INLINE void norm_row(float* to, const float* from, const float* weight, int64_t n, float eps) {
  const float scale = 1.f / std::sqrt(dot(from, from, n) / n + eps);
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] * scale * weight[i];
}

FUSED_KERNEL void norm_rows(float* to, const float* from, const float* weight, int64_t rows, int64_t n, float eps) {
  for (int64_t row = 0; row < rows; ++row) norm_row(to + row * n, from + row * n, weight, n, eps);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t n = x.size(-1);
  TORCH_CHECK(weight.numel() == n, "rms_norm: weight of ", weight.numel(), " for rows of ", n);
  const auto in = x.contiguous();
  auto out = at::empty(x.sizes(), x.options());
  norm_rows(out.data_ptr<float>(), floats(in), contiguous(weight), in.numel() / n, n, static_cast<float>(eps));
  return out;
}

// Norm of queries and keys, if they have one, then rotary position encoding of the first channels

FUSED_KERNEL void norm_rope_rows(
    float* to, const float* from, int64_t from_stride, const float* weight, const float* cos, const float* sin,
    int64_t rows, int64_t heads, int64_t channels, int64_t rotated, float eps) {
  const int64_t half = rotated / 2;
  std::vector<float> room(channels);
  for (int64_t row = 0; row < rows; ++row) {
    const float *c = cos + row * rotated, *s = sin + row * rotated;
    for (int64_t head = 0; head < heads; ++head, to += channels) {
      const float* y = from + row * from_stride + head * channels;
      if (weight != nullptr) {
        norm_row(room.data(), y, weight, channels, eps);
        y = room.data();
      }
      for (int64_t i = 0; i < half; ++i) {
        to[i] = y[i] * c[i] + y[half + i] * s[i];
        to[half + i] = y[half + i] * c[half + i] + y[i] * s[half + i];
      }
      for (int64_t i = rotated; i < channels; ++i) to[i] = y[i];
    }
  }
}

std::tuple<at::Tensor, at::Tensor> norm_rope(
    const at::Tensor& qkv, const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm,
    const at::Tensor& cos, const at::Tensor& sin, int64_t kv_heads, double eps) {
  const int64_t rows = qkv.size(0), channels = qkv.size(2), heads = qkv.size(1) - 2 * kv_heads;
  const int64_t rotated = cos.size(-1);
  TORCH_CHECK(
      cos.numel() == rows * rotated && sin.numel() == cos.numel(), "norm_rope: angles do not match the rows");
  TORCH_CHECK(rotated <= channels && rotated % 2 == 0, "norm_rope: angles do not match the heads");
  TORCH_CHECK(q_norm.has_value() == k_norm.has_value(), "norm_rope: expected two norms or none");
  TORCH_CHECK(
      !q_norm || (q_norm->numel() == channels && k_norm->numel() == channels),
      "norm_rope: norms do not match the heads");
  auto q = at::empty({rows, heads, channels}, qkv.options()), k = at::empty({rows, kv_heads, channels}, qkv.options());
  const float* from = contiguous(qkv);
  const auto run = [&](at::Tensor& to, const std::optional<at::Tensor>& norm, const float* first) {
    norm_rope_rows(
        to.data_ptr<float>(), first, qkv.size(1) * channels, norm ? contiguous(*norm) : nullptr, contiguous(cos),
        contiguous(sin), rows, to.size(1), channels, rotated, static_cast<float>(eps));
  };
  run(q, q_norm, from);
  run(k, k_norm, from + heads * channels);
  return {q, k};
}

// Attention over a paged KV cache, a pool [2 * blocks, K, block_size, C]: block b's keys are row b, its values b + blocks.
// A pool of latents is [blocks, 1, block_size, L]: a token's key, of which the first channels are its value, too.

// Without v: a pool of latents, k [N, 1, L]
void store_kv(
    const at::Tensor& pool, const at::Tensor& slots, const at::Tensor& k, const std::optional<at::Tensor>& v,
    const std::optional<at::Tensor>& repeated) {
  const int64_t rows = k.size(0), heads = k.size(1), channels = k.size(2);
  const int64_t again = repeated ? repeated->numel() : 0, written = rows + again;
  TORCH_CHECK(slots.numel() == (v ? 2 : 1) * written * heads, "store_kv: slots do not match the rows");
  const int64_t* slot = integers(slots);
  const int64_t* others = again ? integers(*repeated) : nullptr;
  const int64_t limit = pool.numel() / channels;
  TORCH_CHECK(pool.is_contiguous() && pool.scalar_type() == at::kFloat, "store_kv: expected a contiguous float32 pool");
  float* to = pool.data_ptr<float>();
  const auto write = [&](const at::Tensor& kv) {
    TORCH_CHECK(
        kv.size(0) == rows && kv.size(1) == heads && kv.size(2) == channels && kv.stride(2) == 1 &&
            (heads == 1 || kv.stride(1) == channels),
        "store_kv: expected contiguous heads");
    const float* from = floats(kv);
    for (int64_t i = 0; i < written; ++i) {
      const int64_t row = i < rows ? i : others[i - rows];
      for (int64_t head = 0; head < heads; ++head, ++slot) {
        TORCH_CHECK_INDEX(*slot >= 0 && *slot < limit, "store_kv: slot ", *slot, " of ", limit);
        std::memcpy(to + *slot * channels, from + row * kv.stride(0) + head * channels, channels * sizeof(float));
      }
    }
  };
  write(k);
  if (v) write(*v);
}

struct Pool {
  const float* data;
  int64_t blocks, heads, block_size, channels;

  const float* keys(int64_t block, int64_t head) const {
    return data + (block * heads + head) * block_size * channels;
  }
  const float* values(int64_t block, int64_t head) const {
    return keys(block + blocks, head);
  }
};

// The products of a query with the keys of a block, of which those behind a multiple of eight are computed one by one.
// All lanes are computed, also those that no token has filled, so that a key's score never depends on the others.
FUSED_INLINE void score_block(float* scores, const float* query, const float* keys, int64_t size, int64_t channels) {
  int64_t t = 0;
  for (; t + kLanes <= size && channels % kLanes == 0; t += kLanes, keys += kLanes * channels) {
    Vec products[kLanes] = {};
    for (int64_t i = 0; i < channels; i += kLanes) {
      const Vec q = load(query + i);
      for (int key = 0; key < kLanes; ++key) products[key] += q * load(keys + key * channels + i);
    }
    store(scores + t, sums(products));
  }
  for (; t < size; ++t, keys += channels) scores[t] = dot(query, keys, channels);
}

// out += sum of weight[t] * rows[t], for eight channels of each of n groups; row t begins at rows + t * stride
template <int kGroups>
FUSED_INLINE void add_groups(float* out, const float* rows, const float* weight, int64_t count, int64_t stride) {
  Vec sums[kGroups];
  for (int g = 0; g < kGroups; ++g) sums[g] = load(out + g * kLanes);
  for (int64_t t = 0; t < count; ++t) {
    for (int g = 0; g < kGroups; ++g) sums[g] += load(rows + t * stride + g * kLanes) * weight[t];
  }
  for (int g = 0; g < kGroups; ++g) store(out + g * kLanes, sums[g]);
}

// out += sum of weight[t] * rows[t], of the first n channels
FUSED_INLINE void add_weighted(
    float* out, const float* rows, const float* weight, int64_t count, int64_t stride, int64_t n) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) add_groups<4>(out + i, rows + i, weight, count, stride);
  for (; i + kLanes <= n; i += kLanes) add_groups<1>(out + i, rows + i, weight, count, stride);
  for (; i < n; ++i) {
    for (int64_t t = 0; t < count; ++t) out[i] += rows[t * stride + i] * weight[t];
  }
}

FUSED_KERNEL void attend_row(
    float* out, float* lse, const float* query, const Pool& pool, const int64_t* blocks, int64_t length, int64_t heads,
    float* scores, float* scaled) {
  const int64_t channels = pool.channels, size = pool.block_size, group = heads / pool.heads;
  const float scale = 1.f / std::sqrt(static_cast<float>(channels));
  for (int64_t head = 0; head < heads; ++head, query += channels, out += channels) {
    for (int64_t i = 0; i < channels; ++i) scaled[i] = query[i] * scale, out[i] = 0;
    for (int64_t start = 0, block = 0; start < length; start += size, ++block) {
      score_block(scores + start, scaled, pool.keys(blocks[block], head / group), size, channels);
    }
    const float top = max_row(scores, length), total = exp_row(scores, scores, length, top);
    lse[head] = top + std::log(total);
    for (int64_t start = 0, block = 0; start < length; start += size, ++block) {
      const float* values = pool.values(blocks[block], head / group);
      add_weighted(out, values, scores + start, std::min(size, length - start), channels, channels);
    }
    for (int64_t i = 0; i < channels; ++i) out[i] /= total;
  }
}

// Row r attends to the first lengths[r] tokens in the blocks table[first[r]], table[first[r] + 1], ...
struct Rows {
  const int64_t *table, *first, *length;
  int64_t most; // blocks of a row

  Rows(const Pool& kv, int64_t rows, const at::Tensor& blocks, const at::Tensor& starts, const at::Tensor& lengths)
      : table(integers(blocks)), first(integers(starts)), length(integers(lengths)), most(0) {
    TORCH_CHECK(starts.numel() == rows && lengths.numel() == rows, "paged_attention: expected a length for each row");
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t count = (length[row] + kv.block_size - 1) / kv.block_size;
      TORCH_CHECK_INDEX(
          length[row] > 0 && first[row] >= 0 && first[row] + count <= blocks.numel(), "paged_attention: row ", row,
          " has no blocks for ", length[row], " tokens");
      most = std::max(most, count);
    }
    for (int64_t i = 0; i < blocks.numel(); ++i) {
      TORCH_CHECK_INDEX(table[i] >= 0 && table[i] < kv.blocks, "paged_attention: block ", table[i], " of ", kv.blocks);
    }
  }

  const int64_t* blocks(int64_t row) const {
    return table + first[row];
  }
};

// Returns the attention [N, H, C], and the log-sum-exp of the scores [N, H]
std::tuple<at::Tensor, at::Tensor> paged_attention(
    const at::Tensor& q, const at::Tensor& pool, const at::Tensor& table, const at::Tensor& first,
    const at::Tensor& lengths) {
  const int64_t rows = q.size(0), heads = q.size(1);
  const Pool kv{contiguous(pool), pool.size(0) / 2, pool.size(1), pool.size(2), pool.size(3)};
  TORCH_CHECK(q.size(2) == kv.channels && heads % kv.heads == 0, "paged_attention: heads do not match the pool's");
  const Rows read(kv, rows, table, first, lengths);
  auto out = at::empty(q.sizes(), q.options()), lse = at::empty({rows, heads}, q.options());
  const int64_t longest = read.most * kv.block_size;
  auto scores = at::empty({longest + kv.channels}, q.options());
  float *to = out.data_ptr<float>(), *sums = lse.data_ptr<float>(), *room = scores.data_ptr<float>();
  const float* query = contiguous(q);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * heads * kv.channels;
    attend_row(
        to + at, sums + row * heads, query + at, kv, read.blocks(row), read.length[row], heads, room, room + longest);
  }
  return {out, lse};
}

// The attention of all heads to one row of latents. A block is read once, for all heads: each head keeps the maximum of
// its scores so far, and rescales what it has summed where a block has a larger one (FlashAttention, arXiv 2205.14135).
FUSED_KERNEL void attend_latents(
    float* out, float* lse, const float* query, const Pool& pool, const int64_t* blocks, int64_t length, int64_t heads,
    int64_t values, float scale, float* scaled, float* tops, float* totals, float* scores) {
  const int64_t channels = pool.channels, size = pool.block_size;
  for (int64_t i = 0; i < heads * channels; ++i) scaled[i] = query[i] * scale;
  for (int64_t i = 0; i < heads * values; ++i) out[i] = 0;
  for (int64_t head = 0; head < heads; ++head) tops[head] = -std::numeric_limits<float>::infinity(), totals[head] = 0;
  for (int64_t start = 0, block = 0; start < length; start += size, ++block) {
    const float* latents = pool.keys(blocks[block], 0);
    const int64_t count = std::min(size, length - start);
    for (int64_t head = 0; head < heads; ++head) {
      float* sum = out + head * values;
      score_block(scores, scaled + head * channels, latents, size, channels);
      const float top = max_row(scores, count);
      if (!(top <= tops[head])) { // also if it is NaN
        const float kept = exp(all(tops[head] - top))[0];
        for (int64_t i = 0; i < values; ++i) sum[i] *= kept;
        totals[head] *= kept, tops[head] = top;
      }
      totals[head] += exp_row(scores, scores, count, tops[head]);
      add_weighted(sum, latents, scores, count, channels, values);
    }
  }
  for (int64_t head = 0; head < heads; ++head) {
    lse[head] = tops[head] + std::log(totals[head]);
    for (int64_t i = 0; i < values; ++i) out[head * values + i] /= totals[head];
  }
}

// Queries [N, H, L] over a pool of latents; returns the attended values [N, H, values], and the log-sum-exp of the
// scores [N, H]
std::tuple<at::Tensor, at::Tensor> paged_latent_attention(
    const at::Tensor& q, const at::Tensor& pool, const at::Tensor& table, const at::Tensor& first,
    const at::Tensor& lengths, int64_t values, double scale) {
  const int64_t rows = q.size(0), heads = q.size(1);
  const Pool kv{contiguous(pool), pool.size(0), pool.size(1), pool.size(2), pool.size(3)};
  TORCH_CHECK(
      q.size(2) == kv.channels && kv.heads == 1 && 0 < values && values <= kv.channels,
      "paged_latent_attention: heads do not match the pool's");
  const Rows read(kv, rows, table, first, lengths);
  auto out = at::empty({rows, heads, values}, q.options()), lse = at::empty({rows, heads}, q.options());
  auto room = at::empty({heads * (kv.channels + 2) + kv.block_size}, q.options());
  float *to = out.data_ptr<float>(), *scaled = room.data_ptr<float>(), *tops = scaled + heads * kv.channels;
  const float* query = contiguous(q);
  for (int64_t row = 0; row < rows; ++row) {
    attend_latents(
        to + row * heads * values, lse.data_ptr<float>() + row * heads, query + row * heads * kv.channels, kv,
        read.blocks(row), read.length[row], heads, values, static_cast<float>(scale), scaled, tops, tops + heads,
        tops + 2 * heads);
  }
  return {out, lse};
}

// Mixture of experts

FUSED_KERNEL void softmax_row(float* to, const float* from, int64_t n) {
  const float total = exp_row(to, from, n, max_row(from, n));
  for (int64_t i = 0; i < n; ++i) to[i] /= total;
}

// Softmax over the experts, and the k most likely of each row with their weights (of equals the lower index)
std::tuple<at::Tensor, at::Tensor> gate(const at::Tensor& logits, int64_t k, bool normalise) {
  const int64_t rows = logits.size(0), experts = logits.size(1);
  TORCH_CHECK(0 < k && k <= experts, "gate: ", k, " of ", experts, " experts");
  auto weight = at::empty({rows, k}, logits.options());
  auto expert = at::empty({rows, k}, logits.options().dtype(at::kLong));
  const float* in = contiguous(logits);
  float* w = weight.data_ptr<float>();
  int64_t* chosen = expert.data_ptr<int64_t>();
  std::vector<float> probs(experts);
  for (int64_t row = 0; row < rows; ++row) {
    softmax_row(probs.data(), in + row * experts, experts);
    float total = 0;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t best = std::max_element(probs.begin(), probs.end()) - probs.begin();
      const int64_t at = row * k + i;
      w[at] = probs[best], chosen[at] = best, total += probs[best];
      probs[best] = -1;
    }
    for (int64_t i = 0; normalise && i < k; ++i) w[row * k + i] /= total;
  }
  return {weight, expert};
}

// The row of x for each of its experts, in the order of these: the i-th is that of place order[i] in [N, k]; and how
// many rows each expert has
std::tuple<at::Tensor, at::Tensor, at::Tensor> permute(const at::Tensor& x, const at::Tensor& expert, int64_t experts) {
  const int64_t n = x.size(1), k = expert.size(1), places = expert.numel();
  TORCH_CHECK(expert.size(0) == x.size(0), "permute: experts of ", expert.size(0), " rows for ", x.size(0));
  auto rows = at::empty({places, n}, x.options());
  auto order = at::empty({places}, expert.options()), counts = at::zeros({experts}, expert.options());
  const int64_t* chosen = integers(expert);
  int64_t *at = order.data_ptr<int64_t>(), *count = counts.data_ptr<int64_t>();
  for (int64_t i = 0; i < places; ++i) {
    TORCH_CHECK_INDEX(0 <= chosen[i] && chosen[i] < experts, "permute: expert ", chosen[i], " of ", experts);
    ++count[chosen[i]];
  }
  std::vector<int64_t> next(experts);
  for (int64_t e = 0, before = 0; e < experts; before += count[e++]) next[e] = before;
  const float* from = contiguous(x);
  float* to = rows.data_ptr<float>();
  for (int64_t i = 0; i < places; ++i) {
    const int64_t place = next[chosen[i]]++;
    at[place] = i;
    std::memcpy(to + place * n, from + i / k * n, n * sizeof(float));
  }
  return {rows, order, counts};
}

FUSED_KERNEL void swiglu_rows(float* to, const float* gate_up, int64_t rows, int64_t n) {
  for (int64_t row = 0; row < rows; ++row, to += n, gate_up += 2 * n) {
    const float* up = gate_up + n;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const Vec gate = load(gate_up + i);
      store(to + i, gate / (1.f + exp(-gate)) * load(up + i));
    }
    for (; i < n; ++i) to[i] = gate_up[i] / (1.f + std::exp(-gate_up[i])) * up[i];
  }
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  const int64_t n = gate_up.size(1) / 2;
  auto out = at::empty({gate_up.size(0), n}, gate_up.options());
  swiglu_rows(out.data_ptr<float>(), contiguous(gate_up), gate_up.size(0), n);
  return out;
}

// The SwiGLU of each expert on its counts[e] rows of x. A multiple > 1: an expert's rows are padded to it with zeros, so
// that the bits of a row do not depend on their number (see `linear`).
at::Tensor experts(
    const at::Tensor& x, const at::Tensor& counts, at::TensorList gate_up, at::TensorList down, int64_t multiple) {
  const int64_t rows = x.size(0), n = x.size(1), experts = gate_up.size();
  TORCH_CHECK(counts.numel() == experts && down.size() == gate_up.size(), "experts: expected a count for each expert");
  const int64_t* count = integers(counts);
  int64_t total = 0, most = 0;
  const auto padded = [&](int64_t number) { return (number + multiple - 1) / multiple * multiple; };
  const int64_t inner = experts ? down[0].size(1) : 0;
  for (int64_t e = 0; e < experts; ++e) {
    total += count[e], most = std::max(most, padded(count[e]));
    TORCH_CHECK(
        count[e] >= 0 && gate_up[e].size(0) == 2 * inner && gate_up[e].size(1) == n && down[e].size(1) == inner,
        "experts: expert ", e, " has ", count[e], " rows of ", n, " and weights ", gate_up[e].sizes(), ", ",
        down[e].sizes());
  }
  TORCH_CHECK(total == rows, "experts: counts for ", total, " rows, but there are ", rows);
  auto out = at::empty({rows, experts ? down[0].size(0) : n}, x.options());
  if (rows == 0) return out;
  auto wide = at::empty({most, 2 * inner}, x.options()), narrow = at::empty({most, inner}, x.options());
  auto in = multiple > 1 ? at::empty({most, n}, x.options()) : x;
  auto result = multiple > 1 ? at::empty({most, out.size(1)}, x.options()) : out;
  const float* from = contiguous(x);
  for (int64_t e = 0, start = 0; e < experts; start += count[e++]) {
    if (count[e] == 0) continue;
    const int64_t number = padded(count[e]), place = multiple > 1 ? 0 : start;
    if (multiple > 1) {
      float* to = in.data_ptr<float>();
      std::memcpy(to, from + start * n, count[e] * n * sizeof(float));
      std::memset(to + count[e] * n, 0, (number - count[e]) * n * sizeof(float));
    }
    auto h = wide.narrow(0, 0, number), act = narrow.narrow(0, 0, number), y = result.narrow(0, place, number);
    at::mm_out(h, in.narrow(0, place, number), gate_up[e].t());
    swiglu_rows(act.data_ptr<float>(), h.const_data_ptr<float>(), number, inner);
    at::mm_out(y, act, down[e].t());
    if (multiple > 1) {
      const int64_t width = out.size(1);
      std::memcpy(out.data_ptr<float>() + start * width, y.const_data_ptr<float>(), count[e] * width * sizeof(float));
    }
  }
  return out;
}

FUSED_KERNEL void add_scaled(float* to, const float* from, float weight, int64_t n, bool first) {
  if (first) {
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] * weight;
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] += from[i] * weight;
  }
}

// The sum of each row's experts, in the router's order
at::Tensor unpermute(const at::Tensor& y, const at::Tensor& order, const at::Tensor& weight) {
  const int64_t rows = weight.size(0), k = weight.size(1), n = y.size(1);
  TORCH_CHECK(order.numel() == rows * k && y.size(0) == rows * k, "unpermute: expected a row for each expert of a row");
  auto out = at::empty({rows, n}, y.options());
  const int64_t* places = integers(order);
  std::vector<int64_t> where(rows * k);
  for (int64_t i = 0; i < rows * k; ++i) where[places[i]] = i;
  const float *from = contiguous(y), *w = contiguous(weight);
  float* to = out.data_ptr<float>();
  for (int64_t i = 0; i < rows * k; ++i) add_scaled(to + i / k * n, from + where[i] * n, w[i], n, i % k == 0);
  return out;
}

} // namespace

TORCH_LIBRARY(rlfusion, m) {
  const auto define = [&](const char* schema, auto* kernel) { m.def(schema, torch::dispatch(at::kCPU, kernel)); };
  define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm);
  define(
      "norm_rope(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, int kv_heads, float eps) -> "
      "(Tensor, Tensor)",
      norm_rope);
  define("store_kv(Tensor(a!) pool, Tensor slots, Tensor k, Tensor? v, Tensor? repeated) -> ()", store_kv);
  define(
      "paged_attention(Tensor q, Tensor pool, Tensor table, Tensor first, Tensor lengths) -> (Tensor, Tensor)",
      paged_attention);
  define(
      "paged_latent_attention(Tensor q, Tensor pool, Tensor table, Tensor first, Tensor lengths, int values, float scale)"
      " -> (Tensor, Tensor)",
      paged_latent_attention);
  define("gate(Tensor logits, int k, bool normalise) -> (Tensor, Tensor)", gate);
  define("permute(Tensor x, Tensor expert, int experts) -> (Tensor, Tensor, Tensor)", permute);
  define("swiglu(Tensor gate_up) -> Tensor", swiglu);
  define("experts(Tensor x, Tensor counts, Tensor[] gate_up, Tensor[] down, int multiple) -> Tensor", experts);
  define("unpermute(Tensor y, Tensor order, Tensor weight) -> Tensor", unpermute);
}

} // namespace fused
