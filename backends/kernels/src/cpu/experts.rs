//! Products with experts: every expert's rows with its own matrix, in blocks that cores take one after the other.

use super::prelude::*;
use firebrick_device::team::run_on_team;
use firebrick_metadata::experts::{ExpertInput, ExpertRows};

/// Rows of a task: of its product's result. The fewer tasks an expert has, the less often its matrix is packed.
const BLOCK: usize = 256;

/// Rows of an expert up to which its product is computed transposed, `W · xᵀ`, which reads the matrix in place: those
/// of decoding.
const SKINNY: usize = 32;

/// Rows of a task that moves them.
const ROWS: usize = 32;

/// Multiplications from which work is shared among cores.
const LARGE: usize = 1 << 18;

/// See [`crate::expert_linear`].
pub(crate) fn expert_linear(x: &Tensor<2>, w: &Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2> {
    let kernel = Linear { rows: rows.clone(), reads, trains: w.is_require_grad() };
    run(kernel, [x, w].map(|t| input(t.clone())))
}

/// See [`crate::combine_experts`].
pub(crate) fn combine_experts(y: &Tensor<2>, weights: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
    run(Combine { rows: rows.clone() }, [y, weights].map(|t| input(t.clone())))
}

#[derive(Clone, Debug)]
struct Linear {
    rows: ExpertRows,
    reads: ExpertInput,
    trains: bool,
}

impl Kernel<2> for Linear {
    const NAME: &str = "experts";

    fn saves(&self) -> [bool; 2] {
        [self.trains, true]
    }

    fn forward(&self, [x, w]: &[FlexTensor; 2]) -> FlexTensor {
        dispatch_float!(x.dtype(), forward(self, x, w))
    }

    fn backward(&self, [x, w]: Maybe<2>, gradient: FlexTensor, wanted: [bool; 2]) -> Maybe<2> {
        let [w] = all_saved([w]);
        // a weight that is neither leaf nor constant would silently lose its gradient
        assert!(x.is_some() || !wanted[1], "the matrices of kernels::expert_linear must be a leaf or a constant");
        let g = &gradient;
        let dx = || dispatch_float!(w.dtype(), gradient_of_rows(self, g, &w));
        let dw = |x: FlexTensor| dispatch_float!(w.dtype(), gradient_of_matrices(self, g, &x));
        [wanted[0].then(dx), x.filter(|_| wanted[1]).map(dw)]
    }
}

impl Linear {
    fn experts(&self) -> usize {
        self.rows.starts().len() - 1
    }

    /// The experts' input, of `width` columns.
    fn input<'a, T>(&'a self, x: &'a [T], width: usize) -> Input<'a, T> {
        Input::new(x, width, &self.rows, self.reads)
    }
}

/// Rows to be read in their sorted order.
#[derive(Clone, Copy)]
pub(super) struct Input<'a, T> {
    x: &'a [T],
    pub width: usize,
    /// The tokens of sorted rows, where there is a row a token.
    order: Option<&'a ExpertRows>,
}

impl<'a, T> Input<'a, T> {
    pub fn new(x: &'a [T], width: usize, rows: &'a ExpertRows, reads: ExpertInput) -> Self {
        Self { x, width, order: (reads == ExpertInput::Tokens).then_some(rows) }
    }
}

impl<T: Real> Input<'_, T> {
    /// Sorted rows one behind the other: in place, or copied into `scratch`.
    pub fn rows<'s>(&'s self, rows: &Range<usize>, scratch: &'s mut Vec<T>) -> &'s [T] {
        let Some(order) = self.order else {
            return &self.x[rows.start * self.width..rows.end * self.width];
        };
        scratch.clear();
        for row in rows.clone() {
            scratch.extend_from_slice(&self.x[order.token(row) * self.width..][..self.width]);
        }
        scratch
    }
}

/// A block of a product: its expert and its rows.
type Task = (usize, Range<usize>);

/// Blocks of `rows`, none larger than `size`.
fn blocks(expert: usize, rows: Range<usize>, size: usize) -> impl Iterator<Item = Task> {
    let end = rows.end;
    rows.step_by(size).map(move |start| (expert, start..(start + size).min(end)))
}

/// Runs tasks, on all cores where there is enough to do. Each core has two buffers for all of its tasks.
fn run_all<T: Real>(tasks: &[Task], multiplications: usize, run: impl Fn(&mut [Vec<T>; 2], &Task) + Sync + Send) {
    let none = || [Vec::new(), Vec::new()];
    if multiplications < LARGE {
        let mut scratch = none();
        for task in tasks {
            run(&mut scratch, task);
        }
        return;
    }
    let some = |indices: &mut dyn Iterator<Item = usize>| {
        let mut scratch = none();
        for task in indices {
            run(&mut scratch, &tasks[task]);
        }
    };
    if !run_on_team(tasks.len(), &some) {
        // a task is long: cores take them one by one
        let tasks = tasks.par_iter().with_max_len(1);
        tasks.for_each_init(none, run);
    }
}

/// The product of sorted rows, `[rows, k]`, with the matrix of their expert, for all experts: `[rows, n]`. A matrix has
/// the strides `[row, column]` as the right factor `[k, n]`, and `k · n` numbers.
fn by_expert<T: Real>(
    rows: &ExpertRows,
    input: Input<'_, T>,
    n: usize,
    (w, strides): (&[T], [usize; 2]),
    multiply: Multiply<T>,
) -> FlexTensor {
    let (total, k) = (rows.rows(), input.width);
    let _span = span("product", 2.0 * (total * k * n) as f64);
    let mut out: UninitBuffer<T> = UninitBuffer::new(total * n);
    let start = out.pointer();
    let tasks: Vec<Task> = rows.used().flat_map(|(expert, rows)| blocks(expert, rows, BLOCK)).collect();
    run_all(&tasks, total * k * n, |[copies, results], (expert, rows)| {
        let left = input.rows(rows, copies);
        // SAFETY: tasks have disjoint rows, all within the buffer.
        let start = unsafe { start.get().add(rows.start * n) };
        let matrix =
            Matrix { start: w[expert * k * n..(expert + 1) * k * n].as_ptr(), row: strides[0], column: strides[1] };
        product([rows.len(), k, n], start, (left, matrix), results, multiply);
    });
    // SAFETY: every sorted row is in one task, which has written all of its elements.
    let out = unsafe { out.assume_init() };
    tensor(out, [total, n])
}

/// `a · w` of `[m, k]` and `[k, n]`, written to `m · n` numbers from `out` on.
fn product<T: Real>(
    [m, k, n]: [usize; 3],
    out: *mut T,
    (a, w): (&[T], Matrix<T>),
    scratch: &mut Vec<T>,
    multiply: Multiply<T>,
) {
    if m > SKINNY {
        let target = Target { start: out, row: n, add: false };
        let a = Matrix { start: a.as_ptr(), row: k, column: 1 };
        return multiply(Size { m, k, n }, target, a, w, Parallelism::None);
    }
    scratch.resize(n * m, T::ZERO);
    let target = Target { start: scratch.as_mut_ptr(), row: m, add: false };
    let [w, a] = [Matrix { row: w.column, column: w.row, ..w }, Matrix { start: a.as_ptr(), row: 1, column: k }];
    multiply(Size { m: n, k, n: m }, target, w, a, Parallelism::None);
    for row in 0..m {
        for column in 0..n {
            // SAFETY: the caller's `m · n` numbers, row by row.
            unsafe {
                out.add(row * n + column).write(scratch[column * m + row]);
            }
        }
    }
}

fn forward<T: Real>(kernel: &Linear, x: &FlexTensor, w: &FlexTensor) -> FlexTensor {
    let ([_, inner], [outputs, _]) = (dims(x), dims(w));
    let input = kernel.input::<T>(elements(x), inner);
    let outputs = outputs / kernel.experts();
    by_expert(&kernel.rows, input, outputs, (elements(w), [1, inner]), multiply)
}

fn gradient_of_rows<T: Real>(kernel: &Linear, g: &FlexTensor, w: &FlexTensor) -> FlexTensor {
    let ([_, outputs], [_, inner]) = (dims(g), dims(w));
    let rows = &kernel.rows;
    let sorted = Input { x: elements(g), width: outputs, order: None };
    let sorted = by_expert::<T>(rows, sorted, inner, (elements(w), [inner, 1]), multiply_in_any_order);
    match kernel.reads {
        ExpertInput::Sorted => sorted,
        ExpertInput::Tokens => sums_by_token::<T>(rows, elements(&sorted), inner),
    }
}

/// The sums of sorted rows over the choices of each token.
pub(super) fn sums_by_token<T: Real>(rows: &ExpertRows, sorted: &[T], inner: usize) -> FlexTensor {
    let tokens = rows.rows() / rows.per_token();
    let mut out = vec![T::ZERO; tokens * inner];
    by_token(&mut out, inner, |token, out| {
        for &row in &rows.places()[token * rows.per_token()..][..rows.per_token()] {
            let values = &sorted[row as usize * inner..][..inner];
            for (sum, &x) in out.iter_mut().zip(values) {
                *sum += x;
            }
        }
    });
    tensor(out, [tokens, inner])
}

/// `gᵀ · x` of each expert's rows; zeros for an expert without any.
fn gradient_of_matrices<T: Real>(kernel: &Linear, g: &FlexTensor, x: &FlexTensor) -> FlexTensor {
    let ([total, outputs], [_, inner]) = (dims(g), dims(x));
    let _span = span("product", 2.0 * (total * outputs * inner) as f64);
    let input = kernel.input::<T>(elements(x), inner);
    let g: &[T] = elements(g);
    let rows = &kernel.rows;
    let mut out = vec![T::ZERO; kernel.experts() * outputs * inner];
    let start = SharedPtr(out.as_mut_ptr());
    let tasks: Vec<Task> = rows.used().flat_map(|(expert, _)| blocks(expert, 0..outputs, BLOCK)).collect();
    run_all(&tasks, total * outputs * inner, |[copies, _], (expert, block)| {
        let sorted = rows.starts()[*expert]..rows.starts()[expert + 1];
        let first = (expert * outputs + block.start) * inner;
        // SAFETY: tasks have disjoint rows of the gradient, all within the buffer.
        let start = unsafe { start.get().add(first) };
        let size = Size { m: block.len(), k: sorted.len(), n: inner };
        let target = Target { start, row: inner, add: false };
        let left = Matrix { start: g[sorted.start * outputs + block.start..].as_ptr(), row: 1, column: outputs };
        let right = Matrix { start: input.rows(&sorted, copies).as_ptr(), row: inner, column: 1 };
        multiply_in_any_order(size, target, left, right, Parallelism::None);
    });
    tensor(out, [kernel.experts() * outputs, inner])
}

/// `body(token, row)` for every row of an output, in parallel.
fn by_token<T: Real>(out: &mut [T], width: usize, body: impl Fn(usize, &mut [T]) + Sync + Send) {
    by_rows(out, width, ROWS, |block, out| {
        vectorised!({
            for (i, row) in out.chunks_mut(width).enumerate() {
                body(block * ROWS + i, row);
            }
        });
    });
}

#[derive(Clone, Debug)]
struct Combine {
    rows: ExpertRows,
}

impl Kernel<2> for Combine {
    const NAME: &str = "experts";

    fn forward(&self, [y, weights]: &[FlexTensor; 2]) -> FlexTensor {
        dispatch_float!(y.dtype(), combined(&self.rows, y, weights))
    }

    fn backward(&self, saved: Maybe<2>, gradient: FlexTensor, wanted: [bool; 2]) -> Maybe<2> {
        let [y, weights] = all_saved(saved);
        let g = &gradient;
        let dy = || dispatch_float!(y.dtype(), gradient_of_results(&self.rows, g, &weights));
        let dw = || dispatch_float!(y.dtype(), gradient_of_weights(&self.rows, g, &y));
        [wanted[0].then(dy), wanted[1].then(dw)]
    }
}

fn combined<T: Real>(rows: &ExpertRows, y: &FlexTensor, weights: &FlexTensor) -> FlexTensor {
    let ([_, width], [tokens, per_token]) = (dims(y), dims(weights));
    let (y, weights): (&[T], &[T]) = (elements(y), elements(weights));
    let mut out = vec![T::ZERO; tokens * width];
    by_token(&mut out, width, |token, out| {
        for choice in token * per_token..(token + 1) * per_token {
            let values = &y[rows.places()[choice] as usize * width..][..width];
            let weight = weights[choice];
            for (sum, &x) in out.iter_mut().zip(values) {
                *sum += weight * x;
            }
        }
    });
    tensor(out, [tokens, width])
}

fn gradient_of_results<T: Real>(rows: &ExpertRows, g: &FlexTensor, weights: &FlexTensor) -> FlexTensor {
    let [_, width] = dims(g);
    let (g, weights): (&[T], &[T]) = (elements(g), elements(weights));
    let mut out = vec![T::ZERO; rows.rows() * width];
    by_token(&mut out, width, |row, out| {
        let weight = weights[rows.choices()[row] as usize];
        let values = &g[rows.token(row) * width..][..width];
        for (out, &g) in out.iter_mut().zip(values) {
            *out = weight * g;
        }
    });
    tensor(out, [rows.rows(), width])
}

fn gradient_of_weights<T: Real>(rows: &ExpertRows, g: &FlexTensor, y: &FlexTensor) -> FlexTensor {
    let [tokens, width] = dims(g);
    let (g, y): (&[T], &[T]) = (elements(g), elements(y));
    let mut out = vec![T::ZERO; rows.rows()];
    by_token(&mut out, rows.per_token(), |token, out| {
        let values = &g[token * width..][..width];
        for (j, out) in out.iter_mut().enumerate() {
            let row = rows.places()[token * rows.per_token() + j] as usize;
            *out = dot(values, &y[row * width..][..width]);
        }
    });
    tensor(out, [tokens, rows.per_token()])
}
