//! Rotary position embedding in its rotate-half form (Su et al., 2021), in place where the tensor is not shared.

use super::prelude::*;

/// See [`crate::rotary`].
pub(crate) fn rotary(x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Tensor<3> {
    let [cos, sin] = [cos, sin].map(|angles| detached(angles.clone().cast(DType::F32)));
    run(Rotary { cos, sin }, [autodiff::input(x)])
}

#[derive(Clone, Debug)]
struct Rotary {
    cos: CubeTensor,
    sin: CubeTensor,
}

impl Rotary {
    /// Rotates by the angles, or back where `sign` is −1.
    fn rotate(&self, x: CubeTensor, sign: f32) -> CubeTensor {
        let [tokens, heads, dim] = dims(&x);
        // a unit reads both elements of its pair before it writes either
        let (out, in_place) = reuse_or_alloc(&x);
        let pairs = tokens * heads * dim / 2;
        let size = vector_size([&x, &out], dim / 2);
        let (grid, y) = (Grid::elements([&x], pairs / size), output_arg(&out, in_place, 0));
        let [pairs, half] = [pairs, dim / 2].map(|n| n / size);
        launch!(rotate, grid, size, [x, &self.cos, &self.sin, y], pairs, heads, half, sign, elem(&out));
        out
    }
}

impl Kernel<Cube, 1> for Rotary {
    const NAME: &str = "rotary";
    type Saved = ();

    fn forward(&self, [x]: [CubeTensor; 1]) -> (CubeTensor, ()) {
        (self.rotate(x, 1.0), ())
    }

    /// The transpose of a rotation is its inverse.
    fn backward(&self, (): (), gradient: CubeTensor, _: [bool; 1]) -> [Option<CubeTensor>; 1] {
        [Some(self.rotate(gradient, -1.0))]
    }
}

/// A unit rotates a vector of pairs of one head. `pairs` and `half` count vectors.
#[cube(launch, address_type = "dynamic")]
fn rotate<F: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[Vector<f32, N>],
    sin: &[Vector<f32, N>],
    out: &mut [Vector<F, N>],
    pairs: usize,
    heads: usize,
    half: usize,
    sign: f32,
    #[define(F)] _dtype: ElemType,
) {
    let pair = ABSOLUTE_POS;
    if pair < pairs {
        let (row, i) = (pair / half, pair % half);
        let angle = row / heads * half + i;
        let first = row * half * 2 + i;
        let c = cos[angle];
        let s = sin[angle] * Vector::<f32, N>::new(sign);
        let a = Vector::<f32, N>::cast_from(x[first]);
        let b = Vector::<f32, N>::cast_from(x[first + half]);
        out[first] = Vector::<F, N>::cast_from(a * c - b * s);
        out[first + half] = Vector::<F, N>::cast_from(b * c + a * s);
    }
}
