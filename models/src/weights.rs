//! The weights of a unit as tensors, and the products of activations with them.

use crate::adapter::LoraForward;
use crate::tensor_group::TensorGroup;
use crate::unit::{Slot, TargetModule};
use burn::tensor::Tensor;
use firebrick_backends::kernels::{self, PackedWeights, linear};
use firebrick_spec::QuantizedLayout;

/// Key of a tensor of a unit: its role, and its layout if it is the buffer of a frozen quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightKey {
    /// Its role in the unit.
    pub slot: Slot,
    /// Layout of codes and scales; `None` for a tensor of numbers.
    pub layout: Option<QuantizedLayout>,
}

impl From<Slot> for WeightKey {
    fn from(slot: Slot) -> Self {
        Self { slot, layout: None }
    }
}

/// The weights of a unit: matrices `[out, in]` and vectors `[1, n]`, in the order of its
/// [`ParamSpec`](crate::unit::ParamSpec)s. A frozen matrix in few bits is its buffer, `[1, words]`, and those of
/// experts theirs, `[experts, words]`.
#[derive(Clone, Debug)]
pub struct Weights {
    entries: Vec<(WeightKey, Tensor<2>)>,
    /// Prepacked copies of matrices, for products with few rows.
    panels: Vec<(Slot, PackedWeights)>,
    /// Copies of matrices that multiply the same rows, one below the other, for one product of a decoding step.
    joined: Vec<JoinedMatrix>,
    /// The ranks that have the other parts of these, where they are a rank's share.
    group: Option<TensorGroup>,
}

/// The matrices of several slots and their biases as one: `[out, in]`, and `[1, out]` where all have a bias.
#[derive(Clone, Debug)]
pub(crate) struct JoinedMatrix {
    slots: &'static [Slot],
    pub(crate) matrix: Tensor<2>,
    pub(crate) bias: Option<Tensor<2>>,
}

impl JoinedMatrix {
    /// `x · Wᵀ`, `[rows, out]`, without the biases.
    pub(crate) fn product(&self, x: &Tensor<2>) -> Tensor<2> {
        kernels::linear_unpadded(x, &self.matrix)
    }

    fn bytes(&self) -> usize {
        let tensors = std::iter::once(&self.matrix).chain(&self.bias);
        let bytes = |t: &Tensor<2>| t.shape().num_elements() * t.dtype().size();
        tensors.map(bytes).sum()
    }
}

impl Weights {
    /// Pairs tensors with what they are. Each is `[rows, columns]`; a quantized matrix is its buffer of words.
    pub fn new<K: Into<WeightKey>>(entries: Vec<(K, Tensor<2>)>) -> Self {
        let entries = entries.into_iter();
        Self {
            entries: entries.map(|(key, tensor)| (key.into(), tensor)).collect(),
            panels: Vec::new(),
            joined: Vec::new(),
            group: None,
        }
    }

    /// Makes them one rank's shard of a unit: outputs of matrices that are cut by columns are summed over the group.
    pub(crate) fn shared_by(mut self, group: Option<&TensorGroup>) -> Self {
        self.group = group.cloned();
        self
    }

    /// The ranks that have the other parts of these weights.
    pub(crate) fn group(&self) -> Option<&TensorGroup> {
        self.group.as_ref()
    }

    /// The ranks over which the products with a matrix are summed.
    fn summed_by(&self, matrix: Slot) -> Option<&TensorGroup> {
        self.group.as_ref().filter(|_| matrix.is_cut_by_columns())
    }

    /// These weights with prepacked copies, which products with few rows read instead: `copy` makes that of a slot, if
    /// it should have one. Quantized matrices have none.
    pub(crate) fn prepacked<E>(
        &self,
        copy: impl Fn(Slot, &Tensor<2>) -> Result<Option<PackedWeights>, E>,
    ) -> Result<Self, E> {
        let mut panels = Vec::new();
        let numbers = self.entries.iter().filter(|(key, _)| key.layout.is_none());
        for (WeightKey { slot, .. }, matrix) in numbers {
            panels.extend(copy(*slot, matrix)?.map(|panel| (*slot, panel)));
        }
        Ok(Self { entries: self.entries.clone(), panels, joined: Vec::new(), group: self.group.clone() })
    }

    /// Adds a joined copy of the matrices in these slots, as `join` makes it, where the unit has them, and a bias for
    /// each or for none.
    pub(crate) fn join(&mut self, slots: &'static [Slot], join: impl FnOnce(Vec<Tensor<2>>) -> Tensor<2>) {
        let matrices: Option<Vec<Tensor<2>>> = slots.iter().map(|&slot| self.get(slot)).collect();
        let biases: Vec<Tensor<2>> = slots.iter().filter_map(|&slot| self.bias(slot)).collect();
        let Some(matrices) = matrices else { return };
        let bias = match biases.len() {
            0 => None,
            count if count == slots.len() => Some(Tensor::cat(biases, 1)),
            _ => return,
        };
        self.joined.push(JoinedMatrix { slots, matrix: join(matrices), bias });
    }

    /// The joined copy of the matrices in these slots, if there is one and no adapter adds to any of their products.
    pub(crate) fn joined(&self, slots: &[Slot], lora: Option<LoraForward<'_>>) -> Option<&JoinedMatrix> {
        let joined = self.joined.iter().find(|joined| joined.slots == slots)?;
        (!slots.iter().any(|&slot| self.is_adapted(slot, lora))).then_some(joined)
    }

    /// True if an adapter adds to the product with a matrix.
    fn is_adapted(&self, matrix: Slot, lora: Option<LoraForward<'_>>) -> bool {
        lora.and_then(|_| self.adapter(TargetModule::from_slot(matrix)?)).is_some()
    }

    /// The prepacked copy of a slot's matrix, if there is one.
    pub(crate) fn panels(&self, slot: Slot) -> Option<&PackedWeights> {
        let entry = self.panels.iter().find(|(s, _)| *s == slot);
        entry.map(|(_, panels)| panels)
    }

    /// Bytes of the prepacked copies.
    pub(crate) fn prepacked_bytes(&self) -> usize {
        let panels = self.panels.iter().map(|(_, panels)| panels.bytes());
        let joined = self.joined.iter().map(JoinedMatrix::bytes);
        panels.chain(joined).sum()
    }

    fn entry(&self, slot: Slot) -> Option<&(WeightKey, Tensor<2>)> {
        self.entries.iter().find(|(key, _)| key.slot == slot)
    }

    /// The numbers in `slot`, if the unit has them; `None` for a quantized matrix. `[rows, columns]`.
    pub fn get(&self, slot: Slot) -> Option<Tensor<2>> {
        let (key, tensor) = self.entry(slot)?;
        key.layout.is_none().then(|| tensor.clone())
    }

    /// The buffer of the frozen matrix in `slot`, where it is quantized; one for each expert, `[experts, words]`.
    pub(crate) fn quantized(&self, slot: Slot) -> Option<(QuantizedLayout, &Tensor<2>)> {
        let (key, words) = self.entry(slot)?;
        Some((key.layout?, words))
    }

    /// The tensor in a slot that every unit of this kind has; panics where it is missing.
    pub(crate) fn need(&self, slot: Slot) -> Tensor<2> {
        self.get(slot).unwrap_or_else(|| unreachable!("a unit without its {slot:?}"))
    }

    /// The tensor at an index.
    pub(crate) fn at(&self, index: usize) -> Tensor<2> {
        self.entries[index].1.clone()
    }

    /// The key of the tensor at an index.
    pub(crate) fn key(&self, index: usize) -> WeightKey {
        self.entries[index].0
    }

    /// Takes a tensor out and leaves an empty one until [`Self::put`].
    pub(crate) fn take(&mut self, index: usize) -> Tensor<2> {
        let device = self.entries[index].1.device();
        std::mem::replace(&mut self.entries[index].1, Tensor::empty([0, 0], &device))
    }

    /// Puts a tensor in at an index.
    pub(crate) fn put(&mut self, index: usize, value: Tensor<2>) {
        self.entries[index].1 = value;
    }

    /// Tensors in order. Each is `[rows, columns]`; a quantized matrix is its buffer of words.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor<2>> {
        self.entries.iter().map(|(_, t)| t)
    }

    /// Keys and tensors, in order. Each is `[rows, columns]`; a quantized matrix is its buffer of words.
    pub fn into_entries(self) -> impl Iterator<Item = (WeightKey, Tensor<2>)> {
        self.entries.into_iter()
    }

    /// These weights with `f` applied to tensors of numbers; quantized matrices stay. Prepacked copies are left out.
    /// `f` gets and gives `[rows, columns]`.
    #[must_use]
    pub fn map(&self, f: impl Fn(&Tensor<2>) -> Tensor<2>) -> Self {
        let made = |(key, tensor): &(WeightKey, Tensor<2>)| match key.layout {
            None => (*key, f(tensor)),
            Some(_) => (*key, tensor.clone()),
        };
        Self::new(self.entries.iter().map(made).collect())
    }

    /// A and B of a module's adapter, if it has one.
    pub(crate) fn adapter(&self, target: TargetModule) -> Option<(Tensor<2>, Tensor<2>)> {
        Some((self.get(Slot::LoraA(target))?, self.get(Slot::LoraB(target))?))
    }

    /// The bias that belongs to a matrix, `[1, out]`, if there is one.
    pub(crate) fn bias(&self, matrix: Slot) -> Option<Tensor<2>> {
        self.get(matrix.bias()?)
    }

    /// `x · Wᵀ (+ b) (+ adapter)`, `[rows, out]`, for `x` of shape `[rows, in]`.
    pub(crate) fn linear(&self, x: &Tensor<2>, matrix: Slot, lora: Option<LoraForward<'_>>) -> Tensor<2> {
        match self.summed_by(matrix) {
            Some(group) => {
                let y = group.sum(self.linear_part(x, matrix, lora));
                self.add_bias(y, matrix)
            }
            None => {
                let [y] = self.linear_each(x, [matrix], lora);
                y
            }
        }
    }

    /// A share's part of the product with a matrix that is cut by columns, adapter included: before the sum over the
    /// ranks and the bias.
    pub(crate) fn linear_part(&self, x: &Tensor<2>, matrix: Slot, lora: Option<LoraForward<'_>>) -> Tensor<2> {
        let [y] = self.products(x, [matrix], [None]);
        self.add_adapter(y, x, matrix, lora)
    }

    /// [`Self::linear`] with several matrices and the same `x`.
    pub(crate) fn linear_each<const N: usize>(
        &self,
        x: &Tensor<2>,
        matrices: [Slot; N],
        lora: Option<LoraForward<'_>>,
    ) -> [Tensor<2>; N] {
        let biases = matrices.map(|matrix| self.bias(matrix));
        let mut products = self.products(x, matrices, biases.each_ref().map(Option::as_ref)).into_iter();
        matrices.map(|matrix| {
            let y = products.next().unwrap_or_else(|| unreachable!("one each"));
            self.add_adapter(y, x, matrix, lora)
        })
    }

    /// [`Self::linear`], added to `residual` of shape `[rows, out]`.
    pub(crate) fn linear_add(
        &self,
        residual: Tensor<2>,
        x: &Tensor<2>,
        matrix: Slot,
        lora: Option<LoraForward<'_>>,
    ) -> Tensor<2> {
        if self.summed_by(matrix).is_some() || !self.is_bare(matrix, lora) {
            return residual + self.linear(x, matrix, lora);
        }
        match self.packed(x, [matrix]) {
            Some([packed]) => packed.linear_add(residual, x),
            None => kernels::linear_add(residual, x, &self.need(matrix)),
        }
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` of matrices that are [bare](Self::is_bare).
    pub(crate) fn linear_swiglu(&self, x: &Tensor<2>) -> Tensor<2> {
        match self.packed(x, [Slot::Gate, Slot::Up]) {
            Some([gate, up]) => PackedWeights::linear_swiglu(gate, up, x),
            None => kernels::linear_swiglu(x, &self.need(Slot::Gate), &self.need(Slot::Up)),
        }
    }

    /// The prepacked copies of several matrices, where there are all and products with `x` read them.
    fn packed<const N: usize>(&self, x: &Tensor<2>, slots: [Slot; N]) -> Option<[&PackedWeights; N]> {
        let packed: Vec<&PackedWeights> = slots.iter().filter_map(|&s| self.panels(s)).collect();
        let packed: [&PackedWeights; N] = packed.try_into().ok()?;
        let takes = packed.iter().all(|w| w.takes(x));
        // falling back to the exact weights would silently sample from another policy
        assert!(takes || packed.iter().all(|w| w.is_exact()), "8-bit weights are made only if kernels read them");
        takes.then_some(packed)
    }

    /// `x · Wᵀ (+ b)` with the matrices of several slots.
    fn products<const N: usize>(
        &self,
        x: &Tensor<2>,
        slots: [Slot; N],
        biases: [Option<&Tensor<2>>; N],
    ) -> [Tensor<2>; N] {
        let packed = self.packed(x, slots);
        if packed.is_none() && slots.iter().all(|&slot| self.quantized(slot).is_none()) {
            let weights = slots.map(|slot| self.need(slot));
            return kernels::linear_each(x, weights.each_ref(), biases);
        }
        let products = match packed {
            Some(packed) => PackedWeights::linear_each(x, packed),
            None => slots.map(|slot| match self.quantized(slot) {
                Some((layout, words)) => kernels::quantized_linear(x, words, layout),
                None => linear(x, &self.need(slot)),
            }),
        };
        let mut biases = biases.into_iter();
        products.map(|y| match biases.next().flatten() {
            Some(bias) => kernels::add_bias(y, bias),
            None => y,
        })
    }

    /// True if a product with a matrix is complete: its numbers are not quantized, and there is neither a bias nor an
    /// adapter to add.
    pub(crate) fn is_bare(&self, matrix: Slot, lora: Option<LoraForward<'_>>) -> bool {
        self.quantized(matrix).is_none() && self.bias(matrix).is_none() && !self.is_adapted(matrix, lora)
    }

    /// The product with a matrix, `[rows, out]`, plus its bias where it has one.
    pub(crate) fn add_bias(&self, y: Tensor<2>, matrix: Slot) -> Tensor<2> {
        match self.bias(matrix) {
            Some(b) => kernels::add_bias(y, &b),
            None => y,
        }
    }

    fn add_adapter(&self, y: Tensor<2>, x: &Tensor<2>, matrix: Slot, lora: Option<LoraForward<'_>>) -> Tensor<2> {
        let Some((lora, target)) = lora.zip(TargetModule::from_slot(matrix)) else {
            return y;
        };
        match self.adapter(target) {
            Some((a, b)) => y + lora.run(x.clone(), target, &a, &b),
            None => y,
        }
    }
}
