//! Tensors of a folder that no part of the model is: what they say is compared with what is used instead.

use super::tensor_names::{EMBEDDING, HEAD, is_frequencies, is_scorer};
use super::weights::{Folder, same};
use crate::{Arch, Result};
use firebrick_arch::arch::{Rope, RopeScaling};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// True if a model whose config ties its head to the embedding has another head: transformers 5 compares the two, and
/// takes a head that differs. A folder without weights, or with some that cannot be read, has none.
pub(super) fn has_own_head(dir: &Path, arch: &Arch) -> bool {
    let Some(folder) = Folder::open(dir, arch).ok().filter(|_| arch.tied) else { return false };
    let [embedding, head] = [EMBEDDING, HEAD].map(|name| folder.raw(name));
    embedding.zip(head).is_some_and(|(embedding, head)| {
        let is_copy = embedding.dtype != head.dtype
            && embedding.shape == head.shape
            && folder.floats(EMBEDDING) == folder.floats(HEAD);
        !is_copy && !same(&embedding, &head)
    })
}

/// Reports on a folder, unless that was done before: configs are read again and again.
pub(super) fn report_once(dir: &Path, report: impl FnOnce()) {
    static REPORTED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let mut reported = REPORTED.lock().unwrap_or_else(PoisonError::into_inner);
    if reported.insert(dir.to_owned()) {
        report();
    }
}

/// Reports them, with their count.
pub(super) fn report(dir: &Path, arch: &Arch) -> Result<()> {
    let (folder, dir) = (Folder::open(dir, arch)?, dir.display());
    if is_scorer(arch) && folder.raw(HEAD).is_some() {
        tracing::info!("{dir}: {HEAD} is skipped: this model scores sequences");
    }
    let of_config = frequencies(arch);
    let differs = |name: &&String| {
        let stored = folder.floats(name).unwrap_or_default();
        is_frequencies(name) && !of_config.iter().any(|known| are_same(known, &stored))
    };
    let count = folder.names().filter(differs).count();
    if count > 0 {
        tracing::warn!(
            "{dir}: {count} tensors of rotary frequencies (rotary_emb.inv_freq) differ from config.json, which is used, as \
             in transformers"
        );
    }
    Ok(())
}

/// The frequencies of a config: scaled, and as exports wrote them before they were scaled.
fn frequencies(arch: &Arch) -> Vec<Vec<f64>> {
    let scaled = arch.ropes.iter().flatten().cloned();
    let plain = scaled.clone().map(|rope| Rope { scaling: RopeScaling::Default, ..rope });
    let mut frequencies: Vec<Vec<f64>> = scaled.chain(plain).map(|rope| rope.frequencies(arch.rotary_dim, 1)).collect();
    frequencies.dedup();
    frequencies
}

/// True if they are the same, in bfloat16.
fn are_same(known: &[f64], stored: &[f32]) -> bool {
    let pairs = known.iter().zip(stored);
    known.len() == stored.len() && pairs.into_iter().all(|(a, &b)| (a - f64::from(b)).abs() <= a / 100.0)
}
