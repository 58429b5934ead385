//! Rotary position embedding in its rotate-half form (Su et al., 2021), in place where the tensor is not shared.

use super::prelude::*;

/// See [`crate::rotary`].
pub(crate) fn rotary(x: Tensor<3>, cos: &Tensor<3>, sin: &Tensor<3>) -> Tensor<3> {
    run(Rotary::new(cos, sin), [autodiff::input(x)])
}

/// See [`crate::rotary_each`].
pub(crate) fn rotary_each(x: [Tensor<3>; 2], cos: &Tensor<3>, sin: &Tensor<3>) -> [Tensor<3>; 2] {
    run_several(Rotary::new(cos, sin), x.map(autodiff::input))
}

#[derive(Clone, Debug)]
struct Rotary {
    cos: CubeTensor,
    sin: CubeTensor,
}

impl Rotary {
    fn new(cos: &Tensor<3>, sin: &Tensor<3>) -> Self {
        let [cos, sin] = [cos, sin].map(|angles| detached(angles.clone().cast(DType::F32)));
        Self { cos, sin }
    }

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

/// Two tensors that differ in heads alone, in one launch.
impl Rotary {
    fn rotate_each(&self, x: [CubeTensor; 2], sign: f32) -> [CubeTensor; 2] {
        let [[tokens, heads, dim], [_, others, _]] = x.each_ref().map(dims);
        let [(first, first_in_place), (second, second_in_place)] = x.each_ref().map(reuse_or_alloc);
        let size = vector_size([&x[0], &x[1], &first, &second], dim / 2);
        let half = dim / 2 / size;
        let [pairs, all] = [heads, heads + others].map(|heads| tokens * heads * half);
        let (grid, dtype) = (Grid::elements([&first], all), elem(&first));
        let outputs = [output_arg(&first, first_in_place, 0), output_arg(&second, second_in_place, 1)];
        let ([x, y], [x_out, y_out], cos, sin) = (x, outputs, &self.cos, &self.sin);
        launch!(rotate_each, grid, size, [x, y, cos, sin, x_out, y_out], pairs, all, heads, others, half, sign, dtype);
        [first, second]
    }
}

impl KernelOfSeveral<Cube, 2, 2> for Rotary {
    const NAME: &str = "rotary";
    type Saved = ();

    fn forward(&self, x: [CubeTensor; 2]) -> ([CubeTensor; 2], ()) {
        (self.rotate_each(x, 1.0), ())
    }

    fn backward(&self, (): (), gradients: [Option<CubeTensor>; 2], _: [bool; 2]) -> [Option<CubeTensor>; 2] {
        match gradients {
            [Some(first), Some(second)] => self.rotate_each([first, second], -1.0).map(Some),
            gradients => gradients.map(|gradient| Some(self.rotate(gradient?, -1.0))),
        }
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
    if ABSOLUTE_POS < pairs {
        turn::<F, N>(x, cos, sin, out, ABSOLUTE_POS, heads, half, sign);
    }
}

/// [`rotate`] of two tensors, of whose vectors `pairs` are the first's, and `all` both.
#[cube(launch, address_type = "dynamic")]
fn rotate_each<F: Float, N: Size>(
    x: &[Vector<F, N>],
    y: &[Vector<F, N>],
    cos: &[Vector<f32, N>],
    sin: &[Vector<f32, N>],
    x_out: &mut [Vector<F, N>],
    y_out: &mut [Vector<F, N>],
    pairs: usize,
    all: usize,
    x_heads: usize,
    y_heads: usize,
    half: usize,
    sign: f32,
    #[define(F)] _dtype: ElemType,
) {
    let pair = ABSOLUTE_POS;
    if pair < pairs {
        turn::<F, N>(x, cos, sin, x_out, pair, x_heads, half, sign);
    } else if pair < all {
        turn::<F, N>(y, cos, sin, y_out, pair - pairs, y_heads, half, sign);
    }
}

#[cube]
fn turn<F: Float, N: Size>(
    x: &[Vector<F, N>],
    cos: &[Vector<f32, N>],
    sin: &[Vector<f32, N>],
    out: &mut [Vector<F, N>],
    pair: usize,
    heads: usize,
    half: usize,
    sign: f32,
) {
    let (row, i) = (pair / half, pair % half);
    let angle = row / heads * half + i;
    let first = row * half * 2 + i;
    let c = cos[angle];
    let s = sin[angle] * Vector::<f32, N>::new(sign);
    let a = Vector::<f32, N>::cast_from(x[first]);
    let b = Vector::<f32, N>::cast_from(x[first + half]);
    // written out, so that every kernel that rotates rounds alike
    out[first] = Vector::<F, N>::cast_from(fma(a, c, -(b * s)));
    out[first + half] = Vector::<F, N>::cast_from(fma(b, c, a * s));
}
