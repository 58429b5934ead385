//! A parameter: its role, and what a checkpoint has of it.

use super::slot::Slot;

/// Form of a parameter in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// One tensor of its name and shape.
    Whole,
    /// A tensor per expert, this many, in whose name the index stands in place of the `*`; in memory one lies below the
    /// other.
    ByExpert(usize),
    /// One tensor of all experts, whose numbers have another order in memory.
    Ordered(ExpertOrder),
    /// The matrices B of the adapters of `experts` experts as PEFT has them for one parameter of all experts: `[out,
    /// rank · experts]`, of each rank the experts one behind the other. In memory B of one expert, `[out, rank]`, lies
    /// below that of another.
    AdapterOutputs {
        /// Experts of the layer.
        experts: usize,
        /// The outputs of gate and up are interleaved in the checkpoint.
        interleaved: bool,
    },
}

/// The order of an expert's numbers in a checkpoint, where it is not that in memory: `[out, in]`, the gate's outputs
/// before those of up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOrder {
    /// A matrix is `[in, out]`.
    pub transposed: bool,
    /// The outputs of gate and up are interleaved, the gate's first.
    pub interleaved: bool,
}

/// Rows and columns that are moved together, so that both sides stay in a core's cache.
const TILE: usize = 64;

impl ExpertOrder {
    /// Calls `assign` with every expert, a copy of it, and the places of each number in a checkpoint and in memory.
    fn reorder<T: Copy>(self, [out, input]: [usize; 2], values: &mut [T], assign: impl Fn(&mut [T], &[T], [usize; 2])) {
        let starts = |end: usize| (0..end).step_by(TILE);
        for expert in values.chunks_exact_mut((out * input).max(1)) {
            let copy = expert.to_vec();
            let tiles = starts(out).flat_map(|o| starts(input).map(move |i| [o, i]));
            for [first, column] in tiles {
                for o in first..out.min(first + TILE) {
                    let there = self.output(o, out);
                    for i in column..input.min(column + TILE) {
                        let there = if self.transposed { i * out + there } else { there * input + i };
                        assign(expert, &copy, [there, o * input + i]);
                    }
                }
            }
        }
    }

    /// The place in a checkpoint of an output in memory.
    fn output(self, index: usize, out: usize) -> usize {
        let half = out / 2;
        match (self.interleaved, index < half) {
            (false, _) => index,
            (true, true) => 2 * index,
            (true, false) => 2 * (index - half) + 1,
        }
    }
}

/// A parameter's role, and its name and shape in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Role in its unit.
    pub slot: Slot,
    /// Hugging Face tensor name; PEFT's for an adapter; with a `*` for the index of an expert.
    pub name: String,
    /// Shape: `[n]`, `[out, in]`, `[channels, 1, taps]` of a convolution, or `[experts, out, in]` of experts in one
    /// tensor, `[experts, in, out]` where they lie transposed; of all experts together, `[experts · out, in]`; of the B
    /// of their adapters beside one tensor, `[out, rank · experts]`.
    pub shape: Vec<usize>,
    /// True if it is trained: in a model with adapters only those (and a value head).
    pub trainable: bool,
    /// Form in a checkpoint.
    pub stored: Stored,
}

impl ParamSpec {
    /// A trainable parameter.
    pub fn new(slot: Slot, name: impl Into<String>, shape: &[usize]) -> Self {
        Self { slot, name: name.into(), shape: shape.to_vec(), trainable: true, stored: Stored::Whole }
    }

    /// The matrices `[out, in]` of all experts.
    pub(crate) fn of_experts(slot: Slot, name: String, experts: usize, [out, input]: [usize; 2]) -> Self {
        Self { stored: Stored::ByExpert(experts), ..Self::new(slot, name, &[experts * out, input]) }
    }

    /// The matrices `[out, in]` of all experts in one tensor `[experts, in, out]`, whose outputs may be interleaved.
    pub(super) fn transposed_experts(
        slot: Slot,
        name: String,
        [experts, out, input]: [usize; 3],
        interleaved: bool,
    ) -> Self {
        Self {
            stored: Stored::Ordered(ExpertOrder { transposed: true, interleaved }),
            ..Self::new(slot, name, &[experts, input, out])
        }
    }

    /// The matrices B of the adapters of all experts, beside one parameter of them.
    pub(crate) fn adapter_outputs(
        slot: Slot,
        name: String,
        [experts, out, rank]: [usize; 3],
        interleaved: bool,
    ) -> Self {
        Self {
            stored: Stored::AdapterOutputs { experts, interleaved },
            ..Self::new(slot, name, &[out, rank * experts])
        }
    }

    /// The biases of all experts, `[experts, out]`, which may be interleaved.
    pub(super) fn expert_bias(slot: Slot, name: String, shape: [usize; 2], interleaved: bool) -> Self {
        let mut spec = Self::new(slot, name, &shape);
        if interleaved {
            spec.stored = Stored::Ordered(ExpertOrder { transposed: false, interleaved });
        }
        spec
    }

    /// Shape of what an expert has of it in memory, `[out, in]`; `in` is 1 for biases.
    fn of_expert(&self) -> [usize; 2] {
        match (self.stored, &self.shape[..]) {
            (Stored::Ordered(order), &[_, input, out]) if order.transposed => [out, input],
            (_, &[_, out, input]) => [out, input],
            (_, shape) => [shape[shape.len() - 1], 1],
        }
    }

    /// Puts the numbers of a checkpoint's tensor into their order in memory.
    pub fn into_memory<T: Copy>(&self, values: &mut [T]) {
        self.reorder(values, |target, source, [there, here]| target[here] = source[there]);
    }

    /// Calls `assign` with parts of the values, a copy of each, and the places of every number in a checkpoint and in
    /// memory.
    fn reorder<T: Copy>(&self, values: &mut [T], assign: impl Fn(&mut [T], &[T], [usize; 2])) {
        match self.stored {
            Stored::Ordered(order) => order.reorder(self.of_expert(), values, assign),
            Stored::AdapterOutputs { .. } => {
                let copy = values.to_vec();
                self.each_output(|there, here| assign(values, &copy, [there, here]));
            }
            Stored::Whole | Stored::ByExpert(_) => {}
        }
    }

    /// [`Self::into_memory`] of values that are `[experts, out, in]` in the checkpoint, whatever the order of its plain
    /// tensors.
    pub fn untransposed_into_memory<T: Copy>(&self, values: &mut [T]) {
        if let Stored::Ordered(order) = self.stored {
            let order = ExpertOrder { transposed: false, ..order };
            order.reorder(self.of_expert(), values, |target, source, [there, here]| target[here] = source[there]);
        }
    }

    /// Puts numbers into the order of a checkpoint's tensor.
    pub fn into_checkpoint<T: Copy>(&self, values: &mut [T]) {
        self.reorder(values, |target, source, [there, here]| target[there] = source[here]);
    }

    /// Calls `place` with the places of each number of adapters' B in a checkpoint and in memory.
    fn each_output(&self, mut place: impl FnMut(usize, usize)) {
        let Stored::AdapterOutputs { experts, interleaved } = self.stored else {
            return;
        };
        let ([rows, rank], order) = (self.rows_cols(), ExpertOrder { transposed: false, interleaved });
        let out = rows / experts;
        for row in 0..rows {
            let (expert, output) = (row / out, order.output(row % out, out));
            for j in 0..rank {
                place((output * rank + j) * experts + expert, row * rank + j);
            }
        }
    }

    /// The tensors of a checkpoint that it is made of, from its first row to its last, each with its own name and
    /// shape.
    pub fn tensors(&self) -> Vec<Self> {
        let Stored::ByExpert(experts) = self.stored else {
            return vec![self.clone()];
        };
        let [rows, cols] = self.rows_cols();
        let one = |index: usize| Self {
            name: self.name.replacen('*', &index.to_string(), 1),
            shape: vec![rows / experts, cols],
            stored: Stored::Whole,
            ..self.clone()
        };
        (0..experts).map(one).collect()
    }

    /// Shape of the tensor in memory, `[rows, columns]`: a vector is one row.
    pub fn rows_cols(&self) -> [usize; 2] {
        match self.shape[..] {
            [n] => [1, n],
            [rows, cols] => match self.stored {
                Stored::AdapterOutputs { experts, .. } => [experts * rows, cols / experts],
                _ => [rows, cols],
            },
            [experts, ..] if self.shape.len() == 3 => {
                let [rows, cols] = self.of_expert();
                [experts * rows, cols]
            }
            _ => unreachable!("every parameter of a decoder is a vector or a matrix"),
        }
    }

    /// Number of experts with a matrix in it; `None` for parameters of no experts.
    pub fn experts(&self) -> Option<usize> {
        match (self.stored, &self.shape[..]) {
            (Stored::ByExpert(experts) | Stored::AdapterOutputs { experts, .. }, _) => Some(experts),
            (_, &[experts, _, _]) if self.slot.is_expert() => Some(experts),
            _ => None,
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_that_lie_transposed_with_gate_and_up_in_turns_are_turned_there_and_back() {
        // two experts, three inputs, four outputs: number `100 e + 10 i + o` at [e, i, o]
        let stored: Vec<u32> =
            (0..2).flat_map(|e| (0..3).flat_map(move |i| (0..4).map(move |o| 100 * e + 10 * i + o))).collect();
        let spec = ParamSpec::transposed_experts(Slot::ExpertGateUp, "x".into(), [2, 4, 3], true);
        assert_eq!((spec.shape.as_slice(), spec.rows_cols()), (&[2, 3, 4][..], [8, 3]));
        let mut values = stored.clone();
        spec.into_memory(&mut values);
        // outputs 0 and 2 are the gate's, 1 and 3 those of up
        let rows: Vec<&[u32]> = values.chunks(3).collect();
        assert_eq!(rows[..4], [[0, 10, 20], [2, 12, 22], [1, 11, 21], [3, 13, 23]]);
        assert_eq!(rows[4], [100, 110, 120]);
        spec.into_checkpoint(&mut values);
        assert_eq!(values, stored);
    }

    #[test]
    fn more_rows_than_are_moved_together_and_biases_are_turned_too() {
        let spec = ParamSpec::transposed_experts(Slot::ExpertDown, "x".into(), [1, 70, 130], false);
        let mut values: Vec<usize> = (0..70 * 130).collect();
        spec.into_memory(&mut values);
        assert!((0..70).all(|o| (0..130).all(|i| values[o * 130 + i] == i * 70 + o)));
        let bias = ParamSpec::expert_bias(Slot::ExpertGateUpBias, "x".into(), [2, 4], true);
        let mut values = [0, 1, 2, 3, 10, 11, 12, 13];
        bias.into_memory(&mut values);
        assert_eq!(values, [0, 2, 1, 3, 10, 12, 11, 13]);
        assert_eq!(bias.rows_cols(), [2, 4]);
    }

    #[test]
    fn outputs_of_experts_adapters_lie_as_peft_reads_them_and_come_back() {
        // two experts, four outputs, rank 3: number `100 o + 10 j + e` at [o, j · experts + e]
        let (experts, out, rank) = (2, 4, 3);
        let stored: Vec<usize> = (0..out)
            .flat_map(|o| (0..rank).flat_map(move |j| (0..experts).map(move |e| (o, j, e))))
            .map(|(o, j, e)| 100 * o + 10 * j + e)
            .collect();
        for (interleaved, outputs) in [(false, [0, 1, 2, 3]), (true, [0, 2, 1, 3])] {
            let slot = Slot::LoraB(crate::parameters::TargetModule::ExpertGateUp);
            let shape = [experts, out, rank];
            let spec = ParamSpec::adapter_outputs(slot, "x".into(), shape, interleaved);
            assert_eq!((&spec.shape[..], spec.rows_cols()), (&[4, 6][..], [8, 3]));
            let mut values = stored.clone();
            spec.into_memory(&mut values);
            let rows = (0..experts).flat_map(|e| outputs.map(|o| (e, o)));
            let expected = rows.flat_map(|(e, o)| (0..rank).map(move |j| 100 * o + 10 * j + e));
            assert_eq!(values, expected.collect::<Vec<_>>());
            spec.into_checkpoint(&mut values);
            assert_eq!(values, stored);
        }
    }
}
