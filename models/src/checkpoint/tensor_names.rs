//! Names of tensors: those that a model's files must have, those that they may have besides, and what a larger model
//! calls them.

use super::{bitsandbytes, mxfp4};
use crate::arch::HeadKind;
use crate::unit::{chain, unit_specs};
use crate::{Arch, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The name that a tensor of the language model has in a model of a class that is [written
/// again](Arch::keeps_outer_model).
pub(super) fn nested_name(name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.to_owned(),
    }
}

/// Prefixes of tensors outside the language model in Qwen 3.5: vision, and multi-token prediction.
const UNUSED_PREFIXES: [&str; 2] = ["model.visual.", "mtp."];

/// True for such a tensor.
pub(super) fn is_outer_tensor(name: &str) -> bool {
    UNUSED_PREFIXES.iter().any(|part| name.starts_with(part))
}

/// The parts of such a model that see.
const VISION: [&str; 4] =
    ["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."];

/// The embedding, by which it is found what the names of a file begin with.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// The head of a language model.
pub(super) const HEAD: &str = "lm_head.weight";

/// Prefixes of a file's names over those of a language model by itself.
struct Prefix {
    /// Before `embed_tokens`, `layers` and `norm`.
    body: String,
    /// Before the head.
    whole: String,
}

impl Prefix {
    /// Of a file with some names: none where they are those of a language model by itself, or cannot be told. Known are
    /// parts of models that see images (`language_model.model.`, `model.language_model.`), models without their head
    /// (no prefix), and wrappers (`base_model.model.model.`, `module.model.`, `_orig_mod.model.`).
    fn from_names<'a>(names: impl Iterator<Item = &'a String>) -> Option<Self> {
        let embedding = EMBEDDING.strip_prefix("model.").unwrap_or(EMBEDDING);
        let bodies = names.filter_map(|name| name.strip_suffix(embedding)).filter(|body| {
            // a whole part of a name
            body.is_empty() || body.ends_with('.')
        });
        let [body] = &bodies.collect::<Vec<_>>()[..] else { return None };
        if *body == "model." {
            return None;
        }
        let whole = body.strip_suffix("model.").filter(|rest| rest.is_empty() || rest.ends_with('.'));
        Some(Self { body: (*body).to_owned(), whole: whole.unwrap_or_default().to_owned() })
    }

    fn inner(&self, name: &str) -> String {
        const BODY: [&str; 3] = ["embed_tokens.", "layers.", "norm."];
        let body = name.strip_prefix(&self.body).filter(|rest| BODY.iter().any(|part| rest.starts_with(part)));
        match body {
            Some(rest) => format!("model.{rest}"),
            None => name.strip_prefix(&self.whole).unwrap_or(name).to_owned(),
        }
    }
}

/// Tensors by the names that they have in a language model by itself, and how many were parts that see.
pub(super) fn unnested<P>(tensors: Vec<(String, P)>) -> (Vec<(String, P)>, usize) {
    let Some(prefix) = Prefix::from_names(tensors.iter().map(|(name, _)| name)) else {
        return (tensors, 0);
    };
    let count = tensors.len();
    let sees = |name: &str| VISION.iter().any(|part| name.starts_with(part));
    let language =
        tensors.into_iter().filter(|(name, _)| !sees(name) && !sees(name.strip_prefix(&prefix.whole).unwrap_or(name)));
    let language: Vec<(String, P)> = language.map(|(name, place)| (prefix.inner(&name), place)).collect();
    let seeing = count - language.len();
    (language, seeing)
}

/// Refuses files that lack a tensor, or have one that no part of the model is.
pub(super) fn check_names<P>(dir: &Path, arch: &Arch, place: &BTreeMap<String, P>) -> Result<()> {
    let wanted: Vec<String> = chain(arch)
        .into_iter()
        .flat_map(|unit| unit_specs(arch, unit))
        .flat_map(|spec| spec.tensors())
        .map(|tensor| tensor.name)
        .collect();
    let has = |name: &str| place.contains_key(name);
    let missing: Vec<&String> = wanted.iter().filter(|n| !has(n) && !mxfp4::is_quantised(n, has)).collect();
    if let Some(first) = missing.first() {
        return Err(Error::MissingTensor { path: dir.to_owned(), tensor: (*first).clone(), count: missing.len() });
    }
    if let Some(twice) = wanted.iter().find(|n| has(n) && mxfp4::is_quantised(n, has)) {
        let detail = "is there as it is and in MXFP4; remove one of the two".into();
        return Err(Error::QuantizedWeight { path: dir.to_owned(), tensor: twice.clone(), detail });
    }
    let known: BTreeSet<&String> = wanted.iter().collect();
    let extra: Vec<&String> = place
        .keys()
        .filter(|n| !known.contains(n) && !ignorable(arch, n))
        .filter(|n| {
            let is_part = |weight: String| known.contains(&weight) && bitsandbytes::is_quantised(&weight, has);
            !bitsandbytes::weight_beside(n).is_some_and(is_part)
        })
        .filter(|n| !mxfp4::weight_of(n).is_some_and(|weight| known.contains(&weight.to_owned())))
        .collect();
    match extra.first() {
        Some(first) => {
            Err(Error::UnexpectedTensor { path: dir.to_owned(), tensor: (*first).clone(), count: extra.len() })
        }
        None => Ok(()),
    }
}

/// Tensors that are in files and not in a model: frequencies, which follow from the config; the copy of a tied head,
/// which [is compared](super::weights::has_own_head); the head of the language model that a scorer was made from; and
/// what is written again as it was read.
fn ignorable(arch: &Arch, name: &str) -> bool {
    is_frequencies(name)
        || (name == HEAD && (arch.tied || is_scorer(arch)))
        || (arch.family.is_qwen3_5() && is_outer_tensor(name))
}

/// True if a tensor has rotary frequencies, as exports of transformers before 4.32 do.
pub(super) fn is_frequencies(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

/// True if a model scores sequences.
pub(super) fn is_scorer(arch: &Arch) -> bool {
    matches!(arch.head, HeadKind::Scalar { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_without_or_with_other_prefixes_are_those_of_the_model_by_itself() {
        for (embedding, norm, head) in [
            ("embed_tokens.weight", "norm.weight", "lm_head.weight"),
            ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
            (
                "base_model.model.model.embed_tokens.weight",
                "base_model.model.model.norm.weight",
                "base_model.model.lm_head.weight",
            ),
            ("module.model.embed_tokens.weight", "module.model.norm.weight", "module.lm_head.weight"),
            ("_orig_mod.model.embed_tokens.weight", "_orig_mod.model.norm.weight", "_orig_mod.lm_head.weight"),
            (
                "language_model.model.embed_tokens.weight",
                "language_model.model.norm.weight",
                "language_model.lm_head.weight",
            ),
            ("language_model.embed_tokens.weight", "language_model.norm.weight", "lm_head.weight"),
            ("model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight"),
            ("model.model.embed_tokens.weight", "model.model.norm.weight", "model.lm_head.weight"),
        ] {
            let tensors = [embedding, norm, head, "score.weight"].map(|name| (name.to_owned(), ()));
            let (language, seeing) = unnested(tensors.to_vec());
            let names: Vec<&str> = language.iter().map(|(name, ())| name.as_str()).collect();
            assert_eq!(names, [EMBEDDING, "model.norm.weight", HEAD, "score.weight"], "{embedding}");
            assert_eq!(seeing, 0);
        }
    }

    #[test]
    fn names_that_may_mean_two_models_stay() {
        let tensors = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"].map(|name| (name.to_owned(), ()));
        assert_eq!(unnested(tensors.to_vec()).0, tensors);
    }

    #[test]
    fn parts_that_see_are_counted() {
        let names = ["language_model.model.embed_tokens.weight", "vision_tower.a", "multi_modal_projector.b"];
        let (language, seeing) = unnested(names.map(|name| (name.to_owned(), ())).to_vec());
        assert_eq!((language.len(), seeing), (1, 2));
    }
}
