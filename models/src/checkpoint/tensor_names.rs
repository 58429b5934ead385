//! Names of tensors: those that a model's files must have, those that they may have besides, and what a larger model
//! calls them.

use super::{bitsandbytes, mxfp4};
use crate::arch::HeadKind;
use crate::unit::{chain, unit_specs};
use crate::{Arch, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What names begin with where the language model is a part of one that sees images, and in a model by itself: as the
/// Hub's files have it, and as transformers 5 names its modules.
const NESTED: [(&str, &str); 3] =
    [("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("model.language_model.", "model.")];

/// The name that a tensor of the language model has in a model of a class that is [written
/// again](Arch::keeps_what_surrounds).
pub(super) fn nested_name(name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.to_owned(),
    }
}

/// What Qwen 3.5 has beside its language model: the parts that see, and those that predict several tokens.
const BESIDE: [&str; 2] = ["model.visual.", "mtp."];

/// Whether a tensor is one of them.
pub(super) fn is_beside(name: &str) -> bool {
    BESIDE.iter().any(|part| name.starts_with(part))
}

/// The parts of such a model that see.
const VISION: [&str; 4] =
    ["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."];

/// Tensors by the names that they have in a language model by itself.
pub(super) fn unnested<P>(all: BTreeMap<String, P>) -> BTreeMap<String, P> {
    let inner = |name: &str| {
        let mut known = NESTED.iter();
        known.find_map(|(nested, own)| Some(format!("{own}{}", name.strip_prefix(nested)?)))
    };
    if !all.keys().any(|name| inner(name).is_some()) {
        return all;
    }
    let sees = |name: &str| VISION.iter().any(|part| name.starts_with(part));
    let own = all.into_iter().filter(|(name, _)| !sees(name));
    own.map(|(name, place)| (inner(&name).unwrap_or(name), place)).collect()
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
    let known: BTreeSet<&String> = wanted.iter().collect();
    let extra: Vec<&String> = place
        .keys()
        .filter(|n| !known.contains(n) && !ignorable(arch, n))
        .filter(|n| !bitsandbytes::weight_beside(n).is_some_and(|own| known.contains(&own)))
        .filter(|n| !mxfp4::weight_of(n).is_some_and(|own| known.contains(&own.to_owned())))
        .collect();
    match extra.first() {
        Some(first) => {
            Err(Error::UnexpectedTensor { path: dir.to_owned(), tensor: (*first).clone(), count: extra.len() })
        }
        None => Ok(()),
    }
}

/// Tensors that older exports carry and no architecture needs: derived values, the tied head's copy, and the head of
/// the language model that a scorer was made from.
fn ignorable(arch: &Arch, name: &str) -> bool {
    let scores = matches!(arch.head, HeadKind::Scalar { .. });
    name.ends_with("rotary_emb.inv_freq")
        || ((arch.tied || scores) && name == "lm_head.weight")
        || (arch.family.is_qwen3_5() && is_beside(name))
}
