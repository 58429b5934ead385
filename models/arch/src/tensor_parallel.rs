//! Shares of a model on devices that each hold a part of every matrix (tensor parallelism: Shoeybi et al., 2019,
//! arXiv:1909.08053).
//!
//! Query heads, key heads, rows of the MLP and rows of the vocabulary are divided, in their order. What multiplies the
//! residual stream is cut by rows, what gives it by columns, so that a half of a layer ends with a sum over the
//! devices. Fewer key heads than devices go to several, as in vLLM.

use crate::arch::{Arch, HeadKind, Mixer, QkNorm};
use crate::parameters::{Slot, TargetModule};
use std::ops::Range;

/// One of several devices that share every matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorShare {
    rank: usize,
    ranks: usize,
}

/// Part of a parameter that a device keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All of it.
    Whole,
    /// Some rows of a matrix, and as many zeros below as make it this many.
    Rows(Range<usize>, usize),
    /// Some columns of a matrix, or some values of a vector.
    Columns(Range<usize>),
}

impl TensorShare {
    /// Device `rank` of `ranks`.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn new(rank: usize, ranks: usize) -> Self {
        assert!(rank < ranks, "device {rank} of {ranks}");
        Self { rank, ranks }
    }

    /// Refuses a model that cannot be sharded over `ranks` devices for sampling.
    ///
    /// # Errors
    /// Why not, and what to do instead.
    pub fn check(arch: &Arch, ranks: usize) -> Result<(), String> {
        if ranks <= 1 {
            return Ok(());
        }
        if let Some((layer, experts)) = arch.expert_layers().next() {
            return Err(format!(
                "layer {layer} has {} experts, whose matrices are not sharded; set it to 1, and bound memory with \
                 memory.param_offload",
                experts.count
            ));
        }
        if arch.count(Mixer::GatedDeltaNet) > 0 || arch.attention_gate {
            return Err("its gated DeltaNet layers and gated attention are not sharded; set it to 1".into());
        }
        if let Some(base) = arch.base {
            return Err(format!(
                "its base is in {base}, whose blocks are not sharded; set it to 1, or remove model.lora.base"
            ));
        }
        if arch.head != HeadKind::LanguageModel {
            return Err("it returns one score per token and does not sample".into());
        }
        let [heads, keys] = [arch.num_heads, arch.num_kv_heads];
        if !heads.is_multiple_of(ranks) {
            return Err(format!("attention has {heads} heads; set it to a number that divides {heads}"));
        }
        if !keys.is_multiple_of(ranks) && !ranks.is_multiple_of(keys) {
            return Err(format!(
                "attention has {keys} key heads; set it to a number that divides {keys}, or to a multiple of it"
            ));
        }
        if arch.intermediate_size < ranks || arch.vocab_size < ranks {
            return Err("its matrices have fewer rows than that".into());
        }
        Ok(())
    }

    /// Refuses a model that cannot be sharded over `ranks` devices for training: besides what [`check`](Self::check)
    /// refuses, parts of unlike sizes, and a norm over all heads. A value model has its head whole on every device.
    ///
    /// # Errors
    /// Why not, and what to do instead.
    pub fn check_training(arch: &Arch, ranks: usize) -> Result<(), String> {
        if ranks <= 1 {
            return Ok(());
        }
        let as_language_model = Arch { head: HeadKind::LanguageModel, ..arch.clone() };
        Self::check(&as_language_model, ranks)?;
        if arch.qk_norm == Some(QkNorm::Projection) {
            return Err("its Q/K norms span all heads, so tensor parallelism is not supported; set it to 1, and use \
                 memory.zero_stage: 3"
                .into());
        }
        if arch.attention_sinks {
            return Err("its attention sinks are not sharded; set it to 1".into());
        }
        let width = arch.intermediate_size;
        if !width.is_multiple_of(ranks) {
            return Err(format!("its MLP is {width} wide; set it to a number that divides {width}"));
        }
        let last = Self::new(ranks - 1, ranks);
        if last.vocabulary(arch).is_empty() {
            return Err(format!(
                "its vocabulary of {} tokens leaves a device without any; set it to a smaller number",
                arch.vocab_size
            ));
        }
        Ok(())
    }

    /// This device, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of devices.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The architecture of a share: fewer heads, and a narrower MLP. The vocabulary is the model's.
    pub fn arch(&self, arch: &Arch) -> Arch {
        Arch {
            num_heads: self.heads(arch).len(),
            num_kv_heads: self.key_heads(arch).len(),
            intermediate_size: self.part(arch.intermediate_size).len(),
            joint_value_head: false,
            ..arch.clone()
        }
    }

    /// The architecture of a share that is trained: a value head beside the projection stays.
    pub fn trained_arch(&self, arch: &Arch) -> Arch {
        Arch { joint_value_head: arch.joint_value_head, ..self.arch(arch) }
    }

    /// This device's part of `count`, in their order: parts differ by one at most.
    fn part(&self, count: usize) -> Range<usize> {
        self.rank * count / self.ranks..(self.rank + 1) * count / self.ranks
    }

    fn heads(&self, arch: &Arch) -> Range<usize> {
        self.part(arch.num_heads)
    }

    /// The key heads that its query heads read: those of several devices where there are fewer than devices.
    fn key_heads(&self, arch: &Arch) -> Range<usize> {
        let heads = self.heads(arch);
        let group = arch.group();
        heads.start / group..heads.end.div_ceil(group)
    }

    /// Number of devices that have each key head.
    pub fn key_copies(&self, arch: &Arch) -> usize {
        (self.ranks / arch.num_kv_heads).max(1)
    }

    /// Rows of the embedding and of the projection that a device has; those of the last ones are filled up with zeros.
    pub fn vocabulary_part(&self, arch: &Arch) -> usize {
        arch.vocab_size.div_ceil(self.ranks)
    }

    /// The tokens whose rows this device has.
    pub fn vocabulary(&self, arch: &Arch) -> Range<usize> {
        let (part, vocab) = (self.vocabulary_part(arch), arch.vocab_size);
        (self.rank * part).min(vocab)..((self.rank + 1) * part).min(vocab)
    }

    /// This device's part of a parameter for sampling; `None` for a value head, which does not sample.
    pub fn cut(&self, arch: &Arch, slot: Slot) -> Option<Cut> {
        let dim = arch.head_dim;
        let wide = |heads: Range<usize>| heads.start * dim..heads.end * dim;
        let rows = |range: Range<usize>| {
            let count = range.len();
            Cut::Rows(range, count)
        };
        let (queries, keys) = (wide(self.heads(arch)), wide(self.key_heads(arch)));
        let mlp = self.part(arch.intermediate_size);
        Some(match slot {
            Slot::Q => rows(queries),
            Slot::K | Slot::V => rows(keys),
            Slot::QBias | Slot::O => Cut::Columns(queries),
            Slot::KBias | Slot::VBias => Cut::Columns(keys),
            Slot::QNorm if arch.qk_norm == Some(QkNorm::Projection) => Cut::Columns(queries),
            Slot::KNorm if arch.qk_norm == Some(QkNorm::Projection) => Cut::Columns(keys),
            Slot::Gate | Slot::Up => rows(mlp),
            Slot::GateBias | Slot::UpBias | Slot::Down => Cut::Columns(mlp),
            Slot::Embedding | Slot::Projection => Cut::Rows(self.vocabulary(arch), self.vocabulary_part(arch)),
            // what goes into a matrix that is cut by columns is cut with it, and so is what comes out of one that is
            // cut by rows
            Slot::LoraA(target @ (TargetModule::O | TargetModule::Down)) => self.cut(arch, target.slot())?,
            Slot::LoraB(target) if !matches!(target, TargetModule::O | TargetModule::Down) => {
                self.cut(arch, target.slot())?
            }
            Slot::Value => return None,
            _ => Cut::Whole,
        })
    }

    /// This device's part of a parameter for training: heads with one value per token are whole everywhere.
    pub fn trained_cut(&self, arch: &Arch, slot: Slot) -> Cut {
        let scalar = arch.head != HeadKind::LanguageModel;
        match slot {
            Slot::Projection if scalar => Cut::Whole,
            _ => self.cut(arch, slot).unwrap_or(Cut::Whole),
        }
    }

    /// True if an earlier device has the same part of a parameter: all of it, or key heads that several devices have.
    pub fn is_copy(&self, arch: &Arch, slot: Slot) -> bool {
        let cut = self.trained_cut(arch, slot);
        (0..self.rank).any(|rank| Self::new(rank, self.ranks).trained_cut(arch, slot) == cut)
    }

    /// True if this device's gradient of a parameter must be all-reduced: replicated parameters used by sharded heads,
    /// rows or columns, and key heads that several devices share.
    pub fn has_part_of_gradient(&self, arch: &Arch, slot: Slot) -> bool {
        match slot {
            Slot::QNorm | Slot::KNorm | Slot::LoraA(_) | Slot::LoraB(_) => {
                self.trained_cut(arch, slot) == Cut::Whole || self.shares_keys(arch, slot)
            }
            _ => self.shares_keys(arch, slot),
        }
    }

    /// True for parameters of key heads, if several devices have each of these.
    fn shares_keys(&self, arch: &Arch, slot: Slot) -> bool {
        let of_keys = match slot {
            Slot::K | Slot::V | Slot::KBias | Slot::VBias => true,
            Slot::LoraB(target) => matches!(target, TargetModule::K | TargetModule::V),
            _ => false,
        };
        of_keys && self.key_copies(arch) > 1
    }
}

impl Cut {
    /// Rows and columns of the kept part in a matrix of this shape, without zero padding.
    pub fn block(&self, [rows, columns]: [usize; 2]) -> [Range<usize>; 2] {
        match self {
            Self::Whole => [0..rows, 0..columns],
            Self::Rows(kept, _) => [kept.clone(), 0..columns],
            Self::Columns(kept) => [0..rows, kept.clone()],
        }
    }

    /// Rows and columns of what is kept of a matrix of these.
    pub fn shape(&self, [rows, columns]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Whole => [rows, columns],
            Self::Rows(_, rows) => [*rows, columns],
            Self::Columns(kept) => [rows, kept.len()],
        }
    }
}

impl Slot {
    /// True if the partial outputs of this matrix are summed over the devices that share it.
    pub fn is_cut_by_columns(self) -> bool {
        matches!(self, Self::O | Self::Down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::{chain, unit_specs};
    use serde_json::json;
    use std::path::Path;

    fn arch(more: &serde_json::Value) -> Arch {
        let mut config = json!({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 16, "intermediate_size": 6, "num_hidden_layers": 1,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4
        });
        let config = config.as_object_mut().unwrap();
        config.extend(more.as_object().unwrap().clone());
        Arch::from_config(config, Path::new("config.json")).unwrap()
    }

    #[test]
    fn shares_of_every_parameter_have_the_shapes_of_the_shares_architecture() {
        for (model, ranks) in [("llama", 2), ("olmo3", 4), ("qwen2", 8), ("gemma2", 2)] {
            let arch = arch(&json!({"model_type": model, "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 4, "rms_norm_eps": 1e-6}));
            for rank in 0..ranks {
                let share = TensorShare::new(rank, ranks);
                let shard = share.arch(&arch);
                for kind in chain(&arch) {
                    for (whole, part) in unit_specs(&arch, kind).iter().zip(unit_specs(&shard, kind)) {
                        let shape = share.cut(&arch, whole.slot).unwrap().shape(whole.rows_cols());
                        let expected = match whole.slot {
                            Slot::Embedding | Slot::Projection => [arch.vocab_size.div_ceil(ranks), arch.hidden_size],
                            _ => part.rows_cols(),
                        };
                        assert_eq!(shape, expected, "{model}: {}", whole.name);
                    }
                }
            }
        }
    }

    #[test]
    fn shares_put_together_are_the_model_and_few_key_heads_go_to_several() {
        let arch = arch(&json!({}));
        for ranks in [2, 4, 8] {
            let shares = (0..ranks).map(|rank| TensorShare::new(rank, ranks));
            let ranges = |slot| {
                let kept = shares.clone().map(|share| share.cut(&arch, slot));
                kept.map(|cut| match cut {
                    Some(Cut::Rows(range, _) | Cut::Columns(range)) => range,
                    other => panic!("{other:?}"),
                })
                .collect::<Vec<_>>()
            };
            for (slot, count) in [(Slot::Q, 32), (Slot::O, 32), (Slot::Down, 6), (Slot::Embedding, 10)]
                .into_iter()
                .filter(|(slot, _)| *slot != Slot::Down || ranks <= 6)
            {
                let flat: Vec<usize> = ranges(slot).into_iter().flatten().collect();
                assert_eq!(flat, (0..count).collect::<Vec<_>>(), "{slot:?}");
            }
            let copies = ranks / 2;
            let keys: Vec<usize> = ranges(Slot::K).iter().map(|range| range.start / 4).collect();
            let expected: Vec<usize> = (0..ranks).map(|rank| rank / copies).collect();
            assert_eq!(keys, expected);
            assert_eq!(TensorShare::new(0, ranks).key_copies(&arch), copies);
        }
    }

    #[test]
    fn what_is_trained_is_divided_evenly_or_refused_and_heads_of_one_number_stay_whole() {
        let refusal = |more, ranks| TensorShare::check_training(&arch(&more), ranks).unwrap_err();
        let even = arch(&json!({"intermediate_size": 8}));
        TensorShare::check_training(&even, 4).unwrap();
        TensorShare::check_training(&even.clone().with_value_head(), 4).unwrap();
        assert!(refusal(json!({}), 4).contains("6 wide"));
        let few = refusal(json!({"intermediate_size": 8, "vocab_size": 9}), 8);
        assert!(few.contains("vocabulary of 9"), "{few}");
        let olmo = refusal(json!({"model_type": "olmo3"}), 2);
        assert!(olmo.contains("memory.zero_stage: 3"), "{olmo}");
        let critic = even.clone().with_value_head();
        let share = TensorShare::new(3, 4);
        assert_eq!(share.trained_cut(&critic, Slot::Projection), Cut::Whole);
        assert!(share.trained_arch(&even.clone().with_joint_value_head()).joint_value_head);
        // two key heads on four devices
        let first_of_a_key = [true, false, true, false];
        for (rank, first) in first_of_a_key.into_iter().enumerate() {
            let share = TensorShare::new(rank, 4);
            assert_eq!(share.is_copy(&even, Slot::K), !first);
            assert!(!share.is_copy(&even, Slot::Q));
            assert_eq!(share.is_copy(&even, Slot::InputNorm), rank > 0);
            let part = |slot| share.has_part_of_gradient(&even, slot);
            let expected = [true, true, false, false, true, false];
            let slots = [
                Slot::K,
                Slot::LoraA(TargetModule::Q),
                Slot::LoraA(TargetModule::O),
                Slot::LoraB(TargetModule::Up),
                Slot::LoraB(TargetModule::Down),
                Slot::InputNorm,
            ];
            assert_eq!(slots.map(part), expected);
        }
    }

    #[test]
    fn models_that_cannot_be_divided_are_refused_with_what_to_do() {
        let refusal = |more, ranks| TensorShare::check(&arch(&more), ranks).unwrap_err();
        TensorShare::check(&arch(&json!({})), 4).unwrap();
        assert!(refusal(json!({}), 3).contains("divides 8"));
        let keys = json!({"num_attention_heads": 12, "num_key_value_heads": 6});
        assert!(refusal(keys, 4).contains("6 key heads"));
        let experts =
            json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4});
        assert!(refusal(experts, 2).contains("4 experts"));
        let based = arch(&json!({})).with_base(Some(firebrick_spec::BaseFormat::Nf4));
        assert!(TensorShare::check(&based, 2).unwrap_err().contains("model.lora.base"));
    }
}
