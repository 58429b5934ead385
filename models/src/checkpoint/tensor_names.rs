//! Names of tensors: those that a model's files must have, and those that they may have besides.

use super::weights::is_beside;
use super::{bitsandbytes, mxfp4};
use crate::arch::HeadKind;
use crate::unit::{chain, unit_specs};
use crate::{Arch, Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Refuses files that lack a tensor, or have one that no part of the model is.
pub(super) fn check_names<P>(dir: &Path, arch: &Arch, place: &BTreeMap<String, P>) -> Result<()> {
    let wanted: Vec<String> = chain(arch)
        .into_iter()
        .flat_map(|unit| unit_specs(arch, unit))
        .flat_map(|spec| spec.tensors())
        .map(|tensor| tensor.name)
        .collect();
    let has = |name: &str| place.contains_key(name);
    let missing: Vec<&String> = wanted
        .iter()
        .filter(|n| !has(n) && !mxfp4::is_quantised(n, has))
        .collect();
    if let Some(first) = missing.first() {
        return Err(Error::MissingTensor {
            path: dir.to_owned(),
            tensor: (*first).clone(),
            count: missing.len(),
        });
    }
    let known: BTreeSet<&String> = wanted.iter().collect();
    let extra: Vec<&String> = place
        .keys()
        .filter(|n| !known.contains(n) && !ignorable(arch, n))
        .filter(|n| !bitsandbytes::weight_beside(n).is_some_and(|own| known.contains(&own)))
        .filter(|n| !mxfp4::weight_of(n).is_some_and(|own| known.contains(&own.to_owned())))
        .collect();
    match extra.first() {
        Some(first) => Err(Error::UnexpectedTensor {
            path: dir.to_owned(),
            tensor: (*first).clone(),
            count: extra.len(),
        }),
        None => Ok(()),
    }
}

/// Tensors that older exports carry and no architecture needs: derived values, the tied head's copy, and the head of the
/// language model that a scorer was made from.
fn ignorable(arch: &Arch, name: &str) -> bool {
    let scores = matches!(arch.head, HeadKind::Scalar { .. });
    name.ends_with("rotary_emb.inv_freq")
        || ((arch.tied || scores) && name == "lm_head.weight")
        || (arch.family.is_qwen3_5() && is_beside(name))
}
