//! The weights of a unit, a link of the chain that a decoder is, and products with them.

use crate::adapter::Bypass;
use burn::tensor::Tensor;
use firebrick_backends::kernels::{self, Panels};

pub use firebrick_spec::parameters::{ParamSpec, Slot, Target, UnitKind, chain, unit_specs};

/// A unit's weights as tensors: `[out, in]` matrices and `[1, n]` vectors, in the order of its specs.
#[derive(Clone, Debug)]
pub struct Weights {
    entries: Vec<(Slot, Tensor<2>)>,
    /// Copies of matrices that are laid out for products with few rows.
    panels: Vec<(Slot, Panels)>,
}

impl Weights {
    /// Pairs tensors with their slots.
    #[must_use]
    pub fn new(entries: Vec<(Slot, Tensor<2>)>) -> Self {
        Self {
            entries,
            panels: Vec::new(),
        }
    }

    /// The same with copies of some matrices that products with few rows read instead; `copy` says of which.
    pub(crate) fn packed<E>(
        &self,
        copy: impl Fn(Slot, &Tensor<2>) -> Result<Option<Panels>, E>,
    ) -> Result<Self, E> {
        let mut panels = Vec::new();
        for (slot, matrix) in &self.entries {
            panels.extend(copy(*slot, matrix)?.map(|own| (*slot, own)));
        }
        Ok(Self {
            entries: self.entries.clone(),
            panels,
        })
    }

    /// The copy of a slot's matrix, if there is one.
    pub(crate) fn panels(&self, slot: Slot) -> Option<&Panels> {
        let own = self.panels.iter().find(|(s, _)| *s == slot);
        own.map(|(_, panels)| panels)
    }

    /// Bytes of the copies.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.panels.iter().map(|(_, panels)| panels.bytes()).sum()
    }

    /// The tensor in `slot`, if the unit has one.
    #[must_use]
    pub fn get(&self, slot: Slot) -> Option<Tensor<2>> {
        self.entries
            .iter()
            .find(|(s, _)| *s == slot)
            .map(|(_, t)| t.clone())
    }

    /// The tensor in a slot that every unit of this kind has.
    pub(crate) fn need(&self, slot: Slot) -> Tensor<2> {
        self.get(slot)
            .unwrap_or_else(|| unreachable!("a unit without its {slot:?}"))
    }

    /// The tensor at a place in the order.
    pub(crate) fn at(&self, index: usize) -> Tensor<2> {
        self.entries[index].1.clone()
    }

    /// Takes a tensor out, to be put back: until then an empty one stands in its place.
    pub(crate) fn take(&mut self, index: usize) -> Tensor<2> {
        let device = self.entries[index].1.device();
        std::mem::replace(&mut self.entries[index].1, Tensor::empty([0, 0], &device))
    }

    /// Puts a tensor back.
    pub(crate) fn put(&mut self, index: usize, value: Tensor<2>) {
        self.entries[index].1 = value;
    }

    /// Tensors in order.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor<2>> {
        self.entries.iter().map(|(_, t)| t)
    }

    /// Slots and tensors in order.
    pub fn into_entries(self) -> impl Iterator<Item = (Slot, Tensor<2>)> {
        self.entries.into_iter()
    }

    /// The same slots with other tensors.
    #[must_use]
    pub fn map(&self, f: impl Fn(&Tensor<2>) -> Tensor<2>) -> Self {
        Self::new(self.entries.iter().map(|(s, t)| (*s, f(t))).collect())
    }

    /// A and B of a bypass, if there is one.
    pub(crate) fn bypass(&self, target: Target) -> Option<(Tensor<2>, Tensor<2>)> {
        Some((
            self.get(Slot::LoraA(target))?,
            self.get(Slot::LoraB(target))?,
        ))
    }

    /// `x · Wᵀ (+ b) (+ bypass)` for `x` of shape `[rows, in]`.
    pub(crate) fn linear(
        &self,
        x: &Tensor<2>,
        weight: Slot,
        bias: Slot,
        bypass: Option<Bypass<'_>>,
    ) -> Tensor<2> {
        let [y] = self.products(x, [weight]);
        self.beside(y, x, weight, bias, bypass)
    }

    /// The same with several matrices and their biases, of the same rows.
    pub(crate) fn linear_each<const N: usize>(
        &self,
        x: &Tensor<2>,
        maps: [(Slot, Slot); N],
        bypass: Option<Bypass<'_>>,
    ) -> [Tensor<2>; N] {
        let products = self.products(x, maps.map(|(weight, _)| weight));
        let mut products = products.into_iter();
        maps.map(|(weight, bias)| {
            let y = products.next().unwrap_or_else(|| unreachable!("one each"));
            self.beside(y, x, weight, bias, bypass)
        })
    }

    /// The same, added to `base`.
    pub(crate) fn linear_onto(
        &self,
        base: Tensor<2>,
        x: &Tensor<2>,
        weight: Slot,
        bias: Slot,
        bypass: Option<Bypass<'_>>,
    ) -> Tensor<2> {
        let apart = |base| base + self.linear(x, weight, bias, bypass);
        if !self.is_alone(weight, bias, bypass) {
            return apart(base);
        }
        match self.panels(weight) {
            Some(packed) => packed.linear_onto(base, x).unwrap_or_else(apart),
            None => {
                let fused = kernels::linear_onto(&base, x, &self.need(weight));
                fused.unwrap_or_else(|| apart(base))
            }
        }
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` where a kernel makes it of one piece.
    pub(crate) fn linear_gated(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        match self.panels(Slot::Gate).zip(self.panels(Slot::Up)) {
            Some((gate, up)) => Panels::linear_gated(gate, up, x),
            None => kernels::linear_gated(x, &self.need(Slot::Gate), &self.need(Slot::Up)),
        }
    }

    /// `x · Wᵀ` with the matrices of several slots.
    fn products<const N: usize>(&self, x: &Tensor<2>, slots: [Slot; N]) -> [Tensor<2>; N] {
        let packed: Vec<&Panels> = slots.iter().filter_map(|&s| self.panels(s)).collect();
        let packed: Option<[&Panels; N]> = packed.try_into().ok();
        if let Some(packed) = packed {
            if let Some(products) = Panels::linear_each(x, packed) {
                return products;
            }
            // other numbers would be another policy, without a word
            assert!(
                packed.iter().all(|w| w.is_exact()),
                "8-bit weights are made where kernels read them"
            );
        }
        let weights = slots.map(|slot| self.need(slot));
        let weights = weights.each_ref();
        kernels::linear_each(x, weights).unwrap_or_else(|| weights.map(|w| product(x, w)))
    }

    /// Whether a matrix has neither bias nor bypass beside it.
    pub(crate) fn is_alone(&self, weight: Slot, bias: Slot, bypass: Option<Bypass<'_>>) -> bool {
        let target = bypass.and_then(|_| Target::of(weight));
        self.get(bias).is_none() && target.and_then(|t| self.bypass(t)).is_none()
    }

    /// A product with the bias and the bypass that stand beside its matrix.
    fn beside(
        &self,
        y: Tensor<2>,
        x: &Tensor<2>,
        weight: Slot,
        bias: Slot,
        bypass: Option<Bypass<'_>>,
    ) -> Tensor<2> {
        let y = match self.get(bias) {
            Some(b) => y + b,
            None => y,
        };
        let Some((bypass, target)) = bypass.zip(Target::of(weight)) else {
            return y;
        };
        match self.bypass(target) {
            Some((a, b)) => y + bypass.run(x.clone(), target, &a, &b),
            None => y,
        }
    }
}

/// `x · Wᵀ` for `x` of shape `[rows, in]` and `w` of shape `[out, in]`.
pub(crate) fn product(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    kernels::linear(x, w).unwrap_or_else(|| x.clone().matmul(w.clone().transpose()))
}
