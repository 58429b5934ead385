//! `RMSNorm` (Zhang & Sennrich, 2019, arXiv:1910.07467), alone and with what stands before or after it.

use super::operations;
use crate::shapes::JoinedHeads;
use burn::tensor::Tensor;
use firebrick_device::precision::{stored_as, widened};

operations! {
    /// `x / √(mean(x²) + eps) · (w + offset)` for `x` of shape `[rows, n]` and `w` of shape `[1, n]`; computed in f32
    /// or wider, stored as `x` is.
    pub fn rms_norm(x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Tensor<2> {
        cpu: norm if alike(&[x, w]);
        cube: norm if alike(Operation::Norm, &[x, w]);
        else {
            let stored = x.dtype();
            let (x, w) = (widened(x.clone()), widened(w.clone()) + offset);
            let mean = (x.clone() * x.clone()).mean_dim(1);
            stored_as(x * (mean + eps).sqrt().recip() * w, stored)
        }
    }

    /// [`rms_norm`] of `x`, `[rows, n]`, and `x` for the residual connection around what is normed: the kernel adds both
    /// gradients of `x` as it computes the norm's.
    pub fn rms_norm_residual(x: Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> [Tensor<2>; 2] {
        cube: norm if alike(Operation::Norm, &[&x, w]);
        else { [rms_norm(&x, w, eps, offset), x] }
    }

    /// [`rms_norm`] added to `base`, `[rows, n]`; in place where `base` is not shared.
    pub fn rms_norm_add(base: Tensor<2>, x: Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> Tensor<2> {
        cube: norm if alike(Operation::Norm, &[&base, &x, w]);
        else {
            let normed = rms_norm(&x, w, eps, offset);
            drop(x);
            base + normed
        }
    }

    /// `base + x`, `[rows, n]`, rounded as it is stored, and its [`rms_norm`]; the sum is in place where `base` is not
    /// shared. The kernel is not differentiable.
    pub fn add_rms_norm(base: Tensor<2>, x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> [Tensor<2>; 2] {
        cube: fused_norm if plain(Operation::Norm, &[&base, x, w]);
        else {
            let sum = base + x.clone();
            let normed = rms_norm(&sum, w, eps, offset);
            [sum, normed]
        }
    }

    /// [`add_rms_norm`] of the sum of [`parts`](crate::linear_parts), `[parts, rows · n]` in f32, rounded as `base` is
    /// stored. The kernel is not differentiable.
    pub fn add_rms_norm_parts(
        base: Tensor<2>,
        parts: &Tensor<2>,
        w: &Tensor<2>,
        eps: f64,
        offset: f64,
    ) -> [Tensor<2>; 2] {
        cube: fused_norm if plain(Operation::Norm, &[&base, w]);
        else {
            let x = stored_as(parts.clone().sum_dim(0), base.dtype()).reshape(base.dims());
            add_rms_norm(base, &x, w, eps, offset)
        }
    }

    /// [`rms_norm`] of every query head and key head of rows `[queries | keys | values]`, by the weights of queries and
    /// keys, `[1, dim]` each; in place where `qkv` is not shared. The kernel is not differentiable.
    pub fn norm_heads(
        qkv: Tensor<2>,
        weights: [&Tensor<2>; 2],
        heads: JoinedHeads,
        eps: f64,
        offset: f64,
    ) -> Tensor<2> {
        cube: fused_norm if plain(Operation::Norm, &[&qkv, weights[0], weights[1]]);
        else {
            let ([rows, _], JoinedHeads { queries, keys, dim }) = (qkv.dims(), heads);
            let part = |first: usize, count: usize| qkv.clone().narrow(1, first * dim, count * dim);
            let normed = |part: Tensor<2>, w| {
                let width = part.dims()[1];
                rms_norm(&part.reshape([rows * width / dim, dim]), w, eps, offset).reshape([rows, width])
            };
            let [q, k] = [normed(part(0, queries), weights[0]), normed(part(queries, keys), weights[1])];
            Tensor::cat(vec![q, k, part(queries + keys, keys)], 1)
        }
    }
}
