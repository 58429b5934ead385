//! How evenly routers load their experts.

use firebrick_models::Arch;
use firebrick_models::routing::Routes;

/// The load of experts: the choices of one, over the mean of its layer. 1 is even.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertLoad {
    /// The most loaded expert of each layer; mean over the layers.
    pub max: f64,
    /// The least loaded one; mean over the layers.
    pub min: f64,
    /// Share of the experts of all layers that no token chose.
    pub unused: f64,
}

impl ExpertLoad {
    /// The load that routes make; `None` where there are none.
    pub fn of<'r>(arch: &Arch, routes: impl Iterator<Item = &'r Routes>) -> Option<Self> {
        let layers: Vec<_> = arch.expert_layers().map(|(_, own)| own).collect();
        let mut counts: Vec<Vec<usize>> = layers.iter().map(|own| vec![0; own.count]).collect();
        for routes in routes {
            for row in 0..routes.rows() {
                let mut rest = routes.row(row);
                for (own, counts) in layers.iter().zip(&mut counts) {
                    let (chosen, after) = rest.split_at(own.per_token);
                    rest = after;
                    for &expert in chosen.iter().filter(|&&expert| expert != Routes::UNKNOWN) {
                        counts[usize::from(expert)] += 1;
                    }
                }
            }
        }
        let all: usize = counts.iter().flatten().sum();
        if all == 0 {
            return None;
        }
        let of_layers = |pick: fn(&[usize]) -> usize| {
            let load = |counts: &Vec<usize>| {
                let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
                pick(counts) as f64 / mean
            };
            counts.iter().map(load).sum::<f64>() / counts.len() as f64
        };
        let experts = counts.iter().map(Vec::len).sum::<usize>() as f64;
        let idle = counts.iter().flatten().filter(|&&count| count == 0);
        Some(Self {
            max: of_layers(|counts| counts.iter().copied().max().unwrap_or(0)),
            min: of_layers(|counts| counts.iter().copied().min().unwrap_or(0)),
            unused: idle.count() as f64 / experts,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

    #[test]
    fn the_load_is_relative_to_the_mean_of_a_layer() {
        let config = json!({
            "model_type": "qwen3_moe", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8
        });
        let config = config.as_object().unwrap();
        let arch = Arch::from_config(config, Path::new("config.json")).unwrap();
        // expert 0 three times, 1 twice, 2 once, 3 never: the mean is one and a half
        let unknown = Routes::unknown(3, 2);
        assert_eq!(ExpertLoad::of(&arch, std::iter::once(&unknown)), None);
        let routes = Routes::from_rows(&[&[0, 1], &[0, 2], &[1, 0]]);
        let load = ExpertLoad::of(&arch, std::iter::once(&routes)).unwrap();
        assert!((load.max - 2.0).abs() < 1e-12 && load.min.abs() < 1e-12, "{load:?}");
        assert!((load.unused - 0.25).abs() < 1e-12, "{load:?}");
    }
}
