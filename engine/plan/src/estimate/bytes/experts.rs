//! Layers with experts: parameters that only some tokens use, and rows by expert.

use firebrick_arch::Arch;
use firebrick_arch::arch::{ExpertLayout, MAX_EXPERT_LAYERS};
use firebrick_arch::parameters::{ParamSpec, Slot};
use std::ops::Range;

/// A set of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerSet([u64; MAX_EXPERT_LAYERS.div_ceil(64)]);

impl LayerSet {
    pub fn new(layers: impl Iterator<Item = usize>) -> Self {
        let mut set = Self::default();
        for layer in layers {
            set.0[layer / 64] |= 1 << (layer % 64);
        }
        set
    }

    pub fn has(&self, layer: usize) -> bool {
        let word = self.0.get(layer / 64);
        word.is_some_and(|word| word >> (layer % 64) & 1 == 1)
    }

    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// Parameters of the feed-forward sublayer of a layer with experts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ExpertSizes {
    /// Those of the experts' matrices.
    pub matrices: u64,
    /// Those of the adapters beside them.
    pub adapters: u64,
    /// The share of the experts that a token goes through.
    share: f64,
    pub layers: LayerSet,
}

impl ExpertSizes {
    /// Of those among some layers, whose sublayers have these parameters, adapters included.
    pub fn new(arch: &Arch, layers: &Range<usize>, specs: &[ParamSpec]) -> Self {
        let expert_layers = || arch.expert_layers().filter(|(layer, _)| layers.contains(layer));
        let Some((_, layer)) = expert_layers().next() else {
            return Self::default();
        };
        let count =
            |of: fn(Slot) -> bool| specs.iter().filter(|spec| of(spec.slot)).map(|spec| spec.numel() as u64).sum();
        Self {
            matrices: count(Slot::is_expert),
            adapters: count(|slot| match slot {
                Slot::LoraA(target) | Slot::LoraB(target) => target.is_expert(),
                _ => false,
            }),
            share: layer.per_token as f64 / layer.count as f64,
            layers: LayerSet::new(expert_layers().map(|(layer, _)| layer)),
        }
    }

    /// Of numbers or bytes of all experts of a layer, those of experts that none of so many tokens goes through, in all
    /// layers, where all experts are as likely.
    pub fn unused_of(&self, each: u64, tokens: f64) -> u64 {
        let unused = (1.0 - self.share).powf(tokens);
        (unused * (self.layers.count() * each) as f64) as u64
    }

    /// Numbers of matrices and adapters that none of so many tokens goes through.
    pub fn unused(&self, tokens: f64) -> u64 {
        self.unused_of(self.matrices + self.adapters, tokens)
    }
}

/// Widths of experts; zeros where there are none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ExpertWidths {
    /// Experts of a layer.
    pub count: u64,
    /// Experts of a token.
    pub per_token: u64,
    /// Width of one.
    pub f: u64,
    /// Width of the one that every token goes through besides.
    pub shared: u64,
    /// As wide as all experts of a token but that one: what a joined product of gate and up has besides, backward and
    /// forward.
    joined: [u64; 2],
}

impl ExpertWidths {
    pub fn new(arch: &Arch, on_cpu: bool) -> Self {
        arch.expert_layers().next().map_or_else(Self::default, |(_, layer)| Self {
            count: layer.count as u64,
            per_token: layer.per_token as u64,
            f: layer.intermediate_size as u64,
            shared: layer.shared.unwrap_or(0) as u64,
            joined: match (layer.layout, on_cpu) {
                (ExpertLayout::Apart, _) => [0, 0],
                // the product beside its halves, and the gradients of both
                (ExpertLayout::Stacked, _) => [2, 2],
                // the product beside itself with biases; a kernel takes it whole
                (ExpertLayout::Interleaved, true) => [0, 1],
                // tensor operations have the clamped halves, the gate's sigmoid and their gradients
                (ExpertLayout::Interleaved, false) => [6, 3],
            },
        })
    }

    /// Numbers a token that run through experts at a time, of factors of the width of a dense MLP: the shared one runs
    /// after the others.
    pub fn running(self, [backward, forward]: [u64; 2]) -> [u64; 2] {
        let width = self.per_token * self.f;
        let of = |factors: u64, joined: u64| ((factors + joined) * width).max(factors * self.shared);
        [of(backward, self.joined[0]), of(forward, self.joined[1])]
    }

    /// Of all experts of a token, the shared one too.
    pub fn all(self) -> u64 {
        self.per_token * self.f + self.shared
    }

    /// Elements per token kept by an expert layer: `factors` tensors as wide as all of a token's experts, router
    /// probabilities, and row indices.
    pub fn kept(self, factors: u64) -> u64 {
        factors * self.all() + self.count + 8 * self.per_token
    }
}

#[cfg(test)]
mod tests {
    use crate::estimate::Sizes;
    use crate::estimate::public_models::public;
    use firebrick_arch::lora::LoraConfig;
    use firebrick_arch::parameters::TargetModule;
    use firebrick_spec::BaseFormat;

    #[test]
    fn every_expert_has_adapters_and_all_of_them_are_trained() {
        let arch = public("Qwen3-30B-A3B").expect("known");
        let of = |targets: &[TargetModule]| {
            let lora = LoraConfig { target_modules: targets.to_vec(), ..LoraConfig::default() };
            Sizes::new(&arch, Some(&lora.in_arch(&arch)))
        };
        // rank 16 in 48 layers: q [4096, 2048], k and v [512, 2048], o [2048, 4096]
        let attention = 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512));
        let experts = 48 * 16 * 128 * 3 * (2048 + 768);
        let adapted = of(&TargetModule::all());
        assert_eq!(adapted.trained(), attention + experts);
        assert_eq!((attention, experts), (13_369_344, 830_472_192));
        assert_eq!(adapted.trained_unit(2), experts / 48);
        let targets = [TargetModule::Q, TargetModule::K, TargetModule::V, TargetModule::O];
        assert_eq!(of(&targets).trained(), attention);
        // a token goes through those of 8 of 128 experts
        let plain = Sizes::new(&arch, None);
        assert_eq!(adapted.active_body() - plain.active_body(), attention + experts / 16);
    }

    #[test]
    fn experts_in_few_bits_are_counted_with_a_buffer_each() {
        let arch = public("Qwen3-30B-A3B").expect("known");
        let plain = Sizes::new(&arch, None);
        let few = Sizes::new(&arch.clone().with_base(Some(BaseFormat::Int8)), None);
        let numbers = 48 * 128 * 3 * 2048 * 768;
        // a byte a number and an f32 a row: gate and up have 768 rows, down 2048
        let scales = 48 * 128 * 4 * (2 * 768 + 2048);
        let attention = 48 * (2 * 4096 + 2 * 512) * 2048;
        let of_attention = 48 * 4 * (4096 + 2 * 512 + 2048);
        assert_eq!(few.quantized_elements(), numbers + attention);
        assert_eq!(
            few.bytes(),
            plain.bytes() - plain.width * (numbers + attention) + numbers + attention + scales + of_attention
        );
        // of the experts that a token goes through alone
        assert_eq!(few.dequantized_elements(1.0), attention + numbers / 16);
    }
}
