//! Load of experts by routers.

use firebrick_models::Arch;
use firebrick_models::routing::Routes;

/// Load of experts: tokens of an expert divided by the mean of its layer. 1 is even.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertLoad {
    /// Load of the most loaded expert of a layer, averaged over layers.
    pub max: f64,
    /// Load of the least loaded expert of a layer, averaged over layers.
    pub min: f64,
    /// Fraction of the experts of all layers without tokens.
    pub unused: f64,
}

impl ExpertLoad {
    /// Load of some routes; `None` without any.
    pub fn new<'r>(arch: &Arch, routes: impl Iterator<Item = &'r Routes>) -> Option<Self> {
        let layers: Vec<_> = arch.expert_layers().map(|(_, experts)| experts).collect();
        let mut counts: Vec<Vec<usize>> = layers.iter().map(|experts| vec![0; experts.count]).collect();
        for routes in routes {
            for row in 0..routes.rows() {
                let mut rest = routes.row(row);
                for (experts, counts) in layers.iter().zip(&mut counts) {
                    let (route, after) = rest.split_at(experts.per_token);
                    rest = after;
                    for &expert in route.iter().filter(|&&expert| expert != Routes::UNKNOWN) {
                        counts[usize::from(expert)] += 1;
                    }
                }
            }
        }
        if counts.iter().flatten().sum::<usize>() == 0 {
            return None;
        }
        let mean_load = |pick: fn(&[usize]) -> Option<&usize>| {
            let load = |counts: &Vec<usize>| {
                let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
                pick(counts).map_or(0.0, |&count| count as f64) / mean
            };
            counts.iter().map(load).sum::<f64>() / counts.len() as f64
        };
        let experts = counts.iter().map(Vec::len).sum::<usize>() as f64;
        let unused = counts.iter().flatten().filter(|&&count| count == 0).count();
        Some(Self {
            max: mean_load(|counts| counts.iter().max()),
            min: mean_load(|counts| counts.iter().min()),
            unused: unused as f64 / experts,
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
        assert_eq!(ExpertLoad::new(&arch, std::iter::once(&unknown)), None);
        let routes = Routes::from_rows(&[&[0, 1], &[0, 2], &[1, 0]]);
        let load = ExpertLoad::new(&arch, std::iter::once(&routes)).unwrap();
        assert!((load.max - 2.0).abs() < 1e-12 && load.min.abs() < 1e-12, "{load:?}");
        assert!((load.unused - 0.25).abs() < 1e-12, "{load:?}");
    }
}
