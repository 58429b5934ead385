//! The gated delta rule, of sequences of any length, whole and continued from states.

use super::linear_attention::{Expected, TREES, Tree, convolution, dot, hold, on, sequences};
use super::{assert_near, fused, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::kernels::{self, DeltaHeads, StateRows};

on_gpus!(
    the_delta_rule_and_its_gradients_are_those_of_the_rule_token_by_token,
    a_delta_rule_that_goes_on_behind_another_sequence_is_that_of_both,
    gradients_of_fast_decays_in_long_sequences_are_those_of_the_rule,
    sequences_that_continue_from_states_in_slots_give_what_whole_ones_give,
    heads_that_are_too_wide_have_no_kernel,
);

/// A vector divided by its norm and multiplied by a factor, and the way back of a gradient.
struct Unit {
    x: Vec<f64>,
    r: f64,
    scale: f64,
}

impl Unit {
    fn of(x: &[f64], scale: f64) -> Self {
        let r = 1.0 / (dot(x, x) + 1e-6).sqrt();
        let x = x.to_vec();
        Self { x, r, scale }
    }

    fn vector(&self) -> Vec<f64> {
        self.x.iter().map(|x| x * self.r * self.scale).collect()
    }

    fn back(&self, d: &[f64], into: &mut [f64]) {
        let along = dot(&self.x, d) * self.r * self.r;
        for ((into, x), d) in into.iter_mut().zip(&self.x).zip(d) {
            *into += self.scale * self.r * (d - x * along);
        }
    }
}

/// One value head of the rule over one sequence, with what its backward pass needs.
struct Head<'a> {
    inputs: [&'a [f64]; 3],
    heads: DeltaHeads,
    index: usize,
    /// The state that each token finds, `[key_dim, value_dim]`, and the last one.
    states: Vec<Vec<f64>>,
}

impl Head<'_> {
    /// Where queries, keys and values of a row are.
    fn places(&self, row: usize) -> [usize; 3] {
        let DeltaHeads { keys, key_dim, value_dim, .. } = self.heads;
        let first = row * self.heads.channels();
        let key_head = self.index / self.heads.group();
        [
            first + key_head * key_dim,
            first + (keys + key_head) * key_dim,
            first + 2 * keys * key_dim + self.index * value_dim,
        ]
    }

    fn units(&self, row: usize) -> [Unit; 2] {
        let [q, k, _] = self.places(row);
        let dim = self.heads.key_dim;
        let scale = 1.0 / (dim as f64).sqrt();
        let own = |at: usize, scale| Unit::of(&self.inputs[0][at..][..dim], scale);
        [own(q, scale), own(k, 1.0)]
    }

    /// A token's decayed state, and what it changes of each column: v − S'ᵀ k.
    fn found(&self, state: &[f64], row: usize) -> (Vec<f64>, Vec<f64>) {
        let (dim, width) = (self.heads.key_dim, self.heads.value_dim);
        let [_, k] = self.units(row);
        let (k, v) = (k.vector(), self.places(row)[2]);
        let decay = self.inputs[1][row * self.heads.values + self.index].exp();
        let decayed: Vec<f64> = state.iter().map(|s| s * decay).collect();
        let held = |j| (0..dim).map(|i| decayed[i * width + j] * k[i]).sum::<f64>();
        let u = (0..width).map(|j| self.inputs[0][v + j] - held(j)).collect();
        (decayed, u)
    }

    fn forward(&mut self, row: usize, y: &mut [f64]) {
        let (dim, width) = (self.heads.key_dim, self.heads.value_dim);
        let at = row * self.heads.values + self.index;
        let [q, k] = self.units(row).map(|own| own.vector());
        let (mut state, u) = self.found(self.states.last().expect("one"), row);
        for (i, j) in (0..dim).flat_map(|i| (0..width).map(move |j| (i, j))) {
            state[i * width + j] += k[i] * self.inputs[2][at] * u[j];
            y[at * width + j] += state[i * width + j] * q[i];
        }
        self.states.push(state);
    }

    /// Adds a token's gradients, given that of its output and of the state after it, which becomes that of the state
    /// before.
    fn back(&self, row: usize, index: usize, g: &[f64], d_state: &mut [f64], into: &mut [Vec<f64>]) {
        let (dim, width) = (self.heads.key_dim, self.heads.value_dim);
        let at = row * self.heads.values + self.index;
        let (decay, beta) = (self.inputs[1][at].exp(), self.inputs[2][at]);
        let (g, units) = (&g[at * width..][..width], self.units(row));
        let [q, k] = units.each_ref().map(Unit::vector);
        let (decayed, u) = self.found(&self.states[index], row);
        let after = &self.states[index + 1];
        let line = |m: &[f64], i: usize| m[i * width..(i + 1) * width].to_vec();
        let d_q: Vec<f64> = (0..dim).map(|i| dot(&line(after, i), g)).collect();
        for (at, d) in d_state.iter_mut().enumerate() {
            *d += q[at / width] * g[at % width];
        }
        let column = |j: usize| (0..dim).map(|i| d_state[i * width + j] * k[i]).sum::<f64>();
        let d_delta: Vec<f64> = (0..width).map(column).collect();
        let pull: Vec<f64> = d_delta.iter().map(|d| beta * d).collect();
        let d_k = (0..dim).map(|i| beta * dot(&line(d_state, i), &u) - dot(&line(&decayed, i), &pull));
        let d_k: Vec<f64> = d_k.collect();
        let [at_q, at_k, at_v] = self.places(row);
        units[0].back(&d_q, &mut into[0][at_q..][..dim]);
        units[1].back(&d_k, &mut into[0][at_k..][..dim]);
        for (into, d) in into[0][at_v..].iter_mut().zip(&pull) {
            *into += d;
        }
        into[2][at] = dot(&d_delta, &u);
        for (at, d) in d_state.iter_mut().enumerate() {
            *d -= k[at / width] * pull[at % width];
        }
        into[1][at] = dot(d_state, &decayed);
        for d in d_state.iter_mut() {
            *d *= decay;
        }
    }
}

/// The rule token by token, and the last states, `[slots, values · key_dim · value_dim]`.
fn recurrent(inputs: [&[f64]; 3], g: &[f64], heads: DeltaHeads, all: &[StateRows]) -> (Expected, Vec<f64>) {
    let size = heads.key_dim * heads.value_dim;
    let mut y = vec![0.0; g.len()];
    let mut gradients: Vec<Vec<f64>> = inputs.iter().map(|x| vec![0.0; x.len()]).collect();
    let mut last = vec![0.0; all.len() * heads.state()];
    for StateRows { rows, slot, .. } in all {
        for head in 0..heads.values {
            let states = vec![vec![0.0; size]];
            let mut own = Head { inputs, heads, index: head, states };
            for row in rows.clone() {
                own.forward(row, &mut y);
            }
            let at = slot * heads.state() + head * size;
            last[at..at + size].copy_from_slice(own.states.last().expect("one"));
            let mut d_state = vec![0.0; size];
            for (index, row) in rows.clone().enumerate().rev() {
                own.back(row, index, g, &mut d_state, &mut gradients);
            }
        }
    }
    (Expected { y, gradients }, last)
}

/// Queries, keys and values of so many rows, of which some repeat.
fn rows_of(rows: usize, channels: usize) -> Vec<f64> {
    let mut qkv = numbers(rows * channels, 1, 1.0);
    for row in (3..rows).step_by(5) {
        let (before, own) = qkv.split_at_mut(row * channels);
        own[..channels].copy_from_slice(&before[(row - 1) * channels..]);
    }
    qkv
}

/// Log decays between −`fastest` and −`fastest` / 50, and β between 0 and 1.
fn decays(n: usize, fastest: f64) -> [Vec<f64>; 2] {
    let g = numbers(n, 2, 1.0);
    let g = g.iter().map(|x| -(2.0 * x - 2.0).exp() * fastest).collect();
    let beta = numbers(n, 3, 0.49).iter().map(|x| 0.5 + x).collect();
    [g, beta]
}

const fn heads([keys, values, key_dim, value_dim]: [usize; 4]) -> DeltaHeads {
    DeltaHeads { keys, values, key_dim, value_dim }
}

/// Holds the rule for queries, keys and values in a type.
fn hold_rule(
    heads: DeltaHeads,
    (skipped, lengths): (usize, &[usize]),
    fastest: f64,
    (dtype, tolerance): (DType, f64),
    device: &Device,
) {
    let all = sequences(skipped, lengths, true);
    let rows = skipped + lengths.iter().sum::<usize>();
    let (channels, width) = (heads.channels(), heads.values * heads.value_dim);
    let (qkv, qkvs) = stored(rows_of(rows, channels), [rows, channels], dtype, device);
    let [g, beta] = decays(rows * heads.values, fastest);
    let f32 = |v, columns| stored(v, [rows, columns], DType::F32, device);
    let ((g, gs), (beta, betas)) = (f32(g, heads.values), f32(beta, heads.values));
    let (up, ups) = f32(numbers(rows * width, 7, 1.0), width);
    let (expected, _) = recurrent([&qkvs, &gs, &betas], &ups, heads, &all);
    let own = on(device, &all);
    hold(
        &format!("delta rule over {lengths:?} in {dtype:?}, {heads:?}"),
        &[&qkv, &g, &beta],
        &up,
        &|t| fused(|| kernels::gated_delta_rule([&t[0], &t[1], &t[2]], heads, &own)),
        &expected,
        tolerance,
    );
}

fn the_delta_rule_and_its_gradients_are_those_of_the_rule_token_by_token(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        // a kernel is compiled for every size of a head
        let shapes: &[[usize; 4]] =
            if dtype == DType::F32 { &[[1, 1, 3, 5], [2, 4, 6, 10], [1, 3, 34, 66]] } else { &[[2, 4, 6, 10]] };
        for &shape in shapes {
            for (skipped, lengths) in [(0, vec![1, 2]), (2, vec![70, 3, 64]), (0, vec![150])] {
                let rows = (skipped, lengths.as_slice());
                hold_rule(heads(shape), rows, 0.3, (dtype, tolerance), device);
            }
        }
    }
}

fn a_delta_rule_that_goes_on_behind_another_sequence_is_that_of_both(device: &Device) {
    let heads = heads([2, 4, 6, 10]);
    for (dtype, tolerance) in precisions(device) {
        for tree in TREES {
            let of = Tree::new(tree, device);
            let (rows, channels, width) = (of.tokens, heads.channels(), heads.values * heads.value_dim);
            let (qkv, qkvs) = stored(rows_of(rows, channels), [rows, channels], dtype, device);
            let f32 = |v, columns| stored(v, [rows, columns], DType::F32, device);
            let [(g, gs), (beta, betas)] = decays(rows * heads.values, 0.3).map(|v| f32(v, heads.values));
            let (up, ups) = f32(numbers(rows * width, 7, 1.0), width);
            let inputs = [&qkvs, &gs, &betas].map(|values| of.repeated(values, false));
            let inputs = inputs.each_ref().map(Vec::as_slice);
            let (whole, _) = recurrent(inputs, &of.repeated(&ups, true), heads, &of.whole);
            hold(
                &format!("delta rule over {tree:?} in {dtype:?}"),
                &[&qkv, &g, &beta],
                &up,
                &|t| fused(|| kernels::gated_delta_rule([&t[0], &t[1], &t[2]], heads, &of.shared)),
                &of.merged(whole, 3),
                tolerance,
            );
        }
    }
}

fn gradients_of_fast_decays_in_long_sequences_are_those_of_the_rule(device: &Device) {
    // of these, the gradients of decays are far smaller than the sums that they are differences of
    let one = heads([2, 4, 6, 10]);
    hold_rule(one, (0, &[700, 13]), 4.0, (DType::F32, 1e-5), device);
}

fn sequences_that_continue_from_states_in_slots_give_what_whole_ones_give(device: &Device) {
    for (dtype, tolerance) in precisions(device) {
        hold_pieces(dtype, tolerance, device);
    }
}

/// Runs sequences in pieces: a long one, one that is shorter than the taps, single tokens, and the rest.
fn hold_pieces(dtype: DType, tolerance: f64, device: &Device) {
    let (heads, lengths, taps) = (heads([2, 4, 6, 10]), [90, 70, 5], 4);
    let (rows, channels) = (lengths.iter().sum::<usize>(), heads.channels());
    let whole = sequences(0, &lengths, true);
    let (_, qkv) = stored(rows_of(rows, channels), [rows, channels], dtype, device);
    let round = |v: Vec<f64>| stored(v, [rows, heads.values], DType::F32, device).1;
    let [g, beta] = decays(rows * heads.values, 0.3).map(round);
    let (w, ws) = stored(numbers(channels * taps, 5, 1.0), [channels, taps], dtype, device);
    let columns = heads.values * heads.value_dim;
    let no_gradient = vec![0.0; rows * columns];
    let (rule, states) = recurrent([&qkv, &g, &beta], &no_gradient, heads, &whole);
    let convolved = convolution(&qkv, &ws, &vec![0.0; qkv.len()], channels, &whole).y;
    // pools that hold something else where sequences begin
    let pool = |columns: usize, dtype| Tensor::<2>::full([3, columns], 3.0, (device, dtype));
    let mut pools = (pool(heads.state(), DType::F32), pool(3 * channels, dtype));
    let (mut done, mut begins) = ([0; 3], true);
    for most in [67, 2, 1, 1, 1000] {
        let taken: Vec<usize> = (0..3).map(|i| most.min(lengths[i] - done[i])).collect();
        let piece = |all: &[f64], columns: usize| {
            let own = whole.iter().zip(&done).zip(&taken);
            let own = own.flat_map(|((s, done), n)| all[(s.rows.start + done) * columns..][..n * columns].to_vec());
            own.collect::<Vec<f64>>()
        };
        let layout = on(device, &sequences(0, &taken, begins));
        let tensor = |all: &[f64], columns: usize, dtype| {
            let own = piece(all, columns);
            let shape = [own.len() / columns, columns];
            stored(own, shape, dtype, device).0
        };
        let x = tensor(&qkv, channels, dtype);
        let [g, beta] = [&g, &beta].map(|v| tensor(v, heads.values, DType::F32));
        let continued = fused(|| kernels::continue_delta_rule([&x, &g, &beta], pools.0, heads, &layout));
        let (out, next) = continued;
        pools.0 = next;
        assert_near("output", &values(out), &piece(&rule.y, columns), tolerance);
        let continued = fused(|| kernels::continue_convolution(&x, &w, pools.1, &layout));
        let (out, next) = continued;
        pools.1 = next;
        let expected = piece(&convolved, channels);
        assert_near("sums", &values(out), &expected, tolerance);
        for (done, n) in done.iter_mut().zip(&taken) {
            *done += n;
        }
        begins = false;
    }
    assert_eq!(done, lengths);
    assert_near("states", &values(pools.0), &states, tolerance);
    let kept = whole.iter().rev().flat_map(|s| qkv[(s.rows.end - 3) * channels..s.rows.end * channels].to_vec());
    let kept: Vec<f64> = kept.collect();
    assert_near("last inputs", &values(pools.1), &kept, 0.0);
}

fn heads_that_are_too_wide_have_no_kernel(device: &Device) {
    let wide = heads([1, 1, 257, 4]);
    let zeros = |columns: usize| Tensor::<2>::zeros([2, columns], (device, DType::F32));
    let (qkv, one) = (zeros(wide.channels()), zeros(1));
    let own = on(device, &sequences(0, &[2], true));
    assert!(kernels::fused(|| kernels::gated_delta_rule([&qkv, &one, &one], wide, &own)).is_none());
    let pool = zeros(wide.state());
    assert!(kernels::fused(|| kernels::continue_delta_rule([&qkv, &one, &one], pool, wide, &own)).is_none());
}
