//! Mixtures of experts: which experts tokens go through, as transformers has it, as they were sampled, and as they are
//! trained on.

use std::sync::Arc;

use firebrick_engine::batch::MicroBatch;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::plan::Layout;
use firebrick_engine::rollout::Rerouted;
use firebrick_engine::sequence::Sequence;
use firebrick_models::random::DrawKey;
use firebrick_models::routing::Routes;
use firebrick_sampler::{GenerationRequest, Generator, Sample, SamplingParams, SchedulerConfig};

use crate::support::model::{Model, scored_rows};
use crate::support::{assert_all_close, assert_close, checked, folders};

/// Log-probs of the sampler and of the trainer.
const SCORES: f64 = 1e-4;

/// The models with experts.
fn models() -> Vec<Model> {
    let all = folders("models").into_iter().map(|dir| Model::load(&dir));
    all.filter(|model| model.decoder.arch().route_width() > 0).collect()
}

/// The experts of each token in a layer, of routes of all layers.
fn layer(model: &Model, routes: &Routes, layer: usize) -> Vec<i64> {
    let arch = model.decoder.arch();
    let (first, own) = (arch.route_offset(layer), arch.experts(layer));
    let count = own.expect("experts").per_token;
    let rows = (0..routes.rows()).flat_map(|row| &routes.row(row)[first..first + count]);
    rows.map(|&expert| i64::from(expert)).collect()
}

#[test]
fn routers_choose_the_experts_that_transformers_chooses_best_first() {
    let mut choices = 0;
    for model in models() {
        let golden = model.golden("extra.safetensors");
        let row = &scored_rows(&model.golden("forward.safetensors"))[..1];
        let own: Vec<&Sequence> = row.iter().collect();
        let (arch, device) = (model.decoder.arch(), model.decoder.device());
        let micro = MicroBatch::new(arch, &own, Layout::Packed, 0, device).recorded(arch);
        let _ = model.decoder.hidden(micro.ids.clone(), &micro.ctx);
        let routes = micro.routes().remove(0).expect("recorded");
        for (index, _) in arch.expert_layers() {
            let expected = golden.ints(&format!("router.layer{index}.experts"));
            assert_eq!(layer(&model, &routes, index), expected, "{}: layer {index}", model.name);
            choices += expected.len();
        }
    }
    checked("choices of experts", choices);
}

fn requests(model: &Model) -> Vec<GenerationRequest> {
    let rows = scored_rows(&model.golden("forward.safetensors"));
    let request = |(prompt_index, row): (u32, &Sequence)| GenerationRequest {
        tokens: row.tokens.clone(),
        key: DrawKey { seed: 3, step: 1, prompt_index, sample: 0 },
        max_new_tokens: None,
    };
    (0..).zip(&rows).map(request).collect()
}

/// Completions of a model's rows, two of each.
fn sampled(model: &Model, config: &SchedulerConfig) -> Vec<(Vec<u32>, Sample)> {
    let sampling = SamplingParams { max_new_tokens: 40, ..SamplingParams::default() };
    let requests = requests(model);
    let generator = Generator::new(&model.decoder, None, &sampling).expect("valid settings");
    let generated = generator.run_with(&requests, 2, config, |_| {});
    let samples = generated.expect("samples").samples;
    let own = |sample: Sample| (requests[sample.request].tokens.clone(), sample);
    samples.into_iter().map(own).collect()
}

/// A completion as the trainer scores it, with the routes that it was sampled with or without.
fn sequence((prompt, sample): &(Vec<u32>, Sample), replays: bool) -> Sequence {
    let routes = sample.routes.clone().filter(|_| replays);
    Sequence { routes, ..Sequence::completion(prompt, &sample.tokens) }
}

#[test]
fn sampler_and_trainer_agree_and_replayed_tokens_take_exactly_the_routes_they_were_sampled_with() {
    let mut tokens = 0;
    for model in models() {
        let arch = model.decoder.arch();
        let per_token: Vec<usize> = arch.expert_layers().map(|(_, own)| own.per_token).collect();
        // all at once, and so few blocks that sequences are preempted
        let mut scarce = SchedulerConfig::new(8);
        scarce.kv_cache_bytes = Some(scarce.least_cache_bytes(arch, 64) * 5 / 4);
        for config in [SchedulerConfig::new(8), scarce] {
            let all = sampled(&model, &config);
            for replays in [true, false] {
                let rows: Vec<Sequence> = all.iter().map(|own| sequence(own, replays)).collect();
                let scores = model.score(&model.plain(64), 1.0, &rows);
                for (i, (prompt, sample)) in all.iter().enumerate() {
                    let label = format!("{}: completion {i}, replayed {replays}", model.name);
                    let found: Vec<f64> = sample.full_logps.iter().map(|&l| l.into()).collect();
                    let expected: Vec<f64> = scores.logp[i].iter().map(|&l| l.into()).collect();
                    assert_all_close(&label, &found, &expected, SCORES);
                    let then = sample.routes.as_ref().expect("routes of the sampler");
                    let now = scores.routes[i].as_ref().expect("routes of the trainer");
                    let ran = prompt.len() + sample.tokens.len() - 1;
                    assert_eq!(then.rows(), ran, "{label}: all but the last token");
                    let found = Rerouted::between(then, now, &per_token);
                    assert_eq!(found.tokens, ran * per_token.len(), "{label}");
                    if replays {
                        assert_eq!(&now.slice(0..ran), then.as_ref(), "{label}");
                    }
                    tokens += ran;
                }
            }
        }
    }
    checked("tokens sampled and scored through experts", tokens);
}

/// The routes of a row, every choice moved on by one expert.
fn others(model: &Model, routes: &Routes) -> Routes {
    let arch = model.decoder.arch();
    let counts: Vec<usize> =
        arch.expert_layers().flat_map(|(_, own)| std::iter::repeat_n(own.count, own.per_token)).collect();
    let row = |row: usize| -> Vec<u16> {
        let each = routes.row(row).iter().zip(&counts);
        each.map(|(&expert, &count)| (expert + 1) % count as u16).collect()
    };
    let rows: Vec<Vec<u16>> = (0..routes.rows()).map(row).collect();
    Routes::from_rows(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

#[test]
fn given_routes_decide_scores_and_gradients_whatever_the_routers_would_choose() {
    let mut models_seen = 0;
    for model in models() {
        let all = sampled(&model, &SchedulerConfig::new(8));
        let mut rows: Vec<Sequence> = all.iter().map(|own| sequence(own, true)).collect();
        for row in &mut rows {
            let own = row.routes.as_ref().expect("routes");
            row.routes = Some(Arc::new(others(&model, own)));
            row.columns.weight = Some(vec![1e-2; row.positions.len()]);
        }
        let scores = model.score(&model.plain(64), 1.0, &rows);
        for (i, row) in rows.iter().enumerate() {
            let given = row.routes.as_ref().expect("routes");
            let taken = scores.routes[i].as_ref().expect("recorded");
            assert_eq!(&taken.slice(0..given.rows()), given.as_ref(), "row {i}");
        }
        // other experts are another network
        let logp = |rows: &[Sequence]| model.score(&model.plain(64), 1.0, rows).logp;
        let free: Vec<Sequence> = all.iter().map(|own| sequence(own, false)).collect();
        let free = logp(&free);
        let apart = free[0].iter().zip(&scores.logp[0]).map(|(a, b)| f64::from((a - b).abs()));
        assert!(apart.fold(0.0, f64::max) > 1e-2, "{}", model.name);
        // the update takes them too, where layers are recomputed and where they are not
        let loss = |rows: &[Sequence], every: Option<usize>| {
            let plan = match every {
                None => model.plain(64),
                Some(every) => model.checkpointed(64, every),
            };
            let whole = vec![rows.iter().collect()];
            model.backward(&plan, 1.0, &Nll, &whole)
        };
        let ((kept, kept_gradients), (again, gradients)) = (loss(&rows, None), loss(&rows, Some(1)));
        let expected: f64 = scores.logp.iter().flatten().map(|&l| -1e-2 * f64::from(l)).sum();
        assert_close(&model.name, kept.loss, expected, SCORES);
        assert_close(&model.name, again.loss, expected, SCORES);
        for (name, found) in &kept_gradients {
            assert_all_close(name, found, &gradients[name], SCORES);
        }
        models_seen += 1;
    }
    checked("models with given routes", models_seen);
}
