//! Rotary position embedding in its rotate-half form (Su et al., 2021).

use super::prelude::*;

/// Tokens of a task.
const ROWS: usize = 32;

/// Returns true if the kernel takes these tensors: angles in the type that it computes in.
pub(crate) fn takes(x: &Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> bool {
    supports(x) && alike(&[cos, sin]) && compute_dtype(x.dtype()) == cos.dtype()
}

/// See [`crate::rotary`].
pub(crate) fn rotary(x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Tensor<3> {
    let kernel = Rotary { cos: detached(cos.clone()), sin: detached(sin.clone()) };
    run(kernel, [input(x)])
}

#[derive(Clone, Debug)]
struct Rotary {
    cos: FlexTensor,
    sin: FlexTensor,
}

impl Kernel<1> for Rotary {
    const NAME: &str = "rotary";

    fn saves(&self) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: &[FlexTensor; 1]) -> FlexTensor {
        dispatch_float!(x.dtype(), rotate(x, &self.cos, &self.sin, 1.0))
    }

    /// The transpose of a rotation is its inverse.
    fn backward(&self, _: Maybe<1>, gradient: FlexTensor, _: [bool; 1]) -> Maybe<1> {
        let gradient = contiguous(gradient);
        [Some(dispatch_float!(gradient.dtype(), rotate(&gradient, &self.cos, &self.sin, -1.0)))]
    }
}

fn rotate<T: Real>(x: &FlexTensor, cos: &FlexTensor, sin: &FlexTensor, sign: f64) -> FlexTensor {
    let [tokens, heads, dim] = dims(x);
    let (half, sign) = (dim / 2, T::of(sign));
    let (x, cos, sin): (&[T], &[T], &[T]) = (elements(x), elements(cos), elements(sin));
    let mut out = vec![T::ZERO; x.len()];
    by_rows(&mut out, heads * dim, ROWS, |block, out| {
        let x = &x[block * ROWS * heads * dim..][..out.len()];
        vectorised!({
            let tokens = out.chunks_exact_mut(heads * dim).zip(x.chunks_exact(heads * dim));
            for (token, (out, x)) in tokens.enumerate() {
                let at = (block * ROWS + token) * half;
                let (cos, sin) = (&cos[at..][..half], &sin[at..][..half]);
                for (out, x) in out.chunks_exact_mut(dim).zip(x.chunks_exact(dim)) {
                    rotate_half(out, x, cos, sin, sign);
                }
            }
        });
    });
    tensor(out, [tokens, heads, dim])
}

/// One head of a token, rotated by the token's angles (`rotate_half` of transformers); the inverse where `sign` is −1.
#[inline(always)]
pub(super) fn rotate_half<T: Real>(out: &mut [T], x: &[T], cos: &[T], sin: &[T], sign: T) {
    let half = cos.len();
    let (first, second) = out.split_at_mut(half);
    let (a, b) = x.split_at(half);
    let (second, b, sin) = (&mut second[..half], &b[..half], &sin[..half]);
    for i in 0..half {
        let s = sin[i] * sign;
        first[i] = a[i] * cos[i] - b[i] * s;
        second[i] = b[i] * cos[i] + a[i] * s;
    }
}
