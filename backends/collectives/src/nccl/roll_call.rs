//! Agreement of all ranks on NCCL: each says what it has, and all come to the same answer.

use super::super::{Background, Collective, Result};
use super::card::Card;
use super::library;
use super::ranks::{NcclRanks, staged};
use burn::tensor::Device;
use std::sync::Arc;

/// A rank's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Readiness {
    /// NCCL's version and what tells its GPU from others.
    Ready([u8; 4], [u8; 16]),
    /// The reason why it cannot.
    Not(String),
}

impl Readiness {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Ready(version, uuid) => [&[1], &version[..], &uuid[..]].concat(),
            Self::Not(why) => [&[0], why.as_bytes()].concat(),
        }
    }

    fn decode(bytes: &[u8]) -> Self {
        match bytes.split_first() {
            Some((1, rest)) if rest.len() == 20 => {
                let (mut version, mut uuid) = ([0; 4], [0; 16]);
                version.copy_from_slice(&rest[..4]);
                uuid.copy_from_slice(&rest[4..]);
                Self::Ready(version, uuid)
            }
            Some((0, why)) => Self::Not(String::from_utf8_lossy(why).into_owned()),
            _ => Self::Not("it is another build of this program".into()),
        }
    }
}

/// See [`Nccl::join`](super::Nccl::join).
pub(super) fn join(
    ranks: &Arc<dyn Collective>,
    device: &Device,
) -> Result<std::result::Result<Arc<dyn Collective>, String>> {
    let opened = library::open().and_then(|library| {
        if staged(ranks.as_ref()).is_none() {
            return Err("its collective is none of messages (Threads, Mpi) that could carry NCCL's id".into());
        }
        let card = Card::new(device)?;
        Ok((library.version, card))
    });
    let readiness = match &opened {
        Ok((version, card)) => Readiness::Ready(version.to_le_bytes(), card.uuid),
        Err(why) => Readiness::Not(why.clone()),
    };
    let answers = ranks.exchange(readiness.encode())?;
    let answers: Vec<Readiness> = answers.iter().map(|bytes| Readiness::decode(bytes)).collect();
    match (refused(&answers), opened) {
        (Some(why), _) | (None, Err(why)) => Ok(Err(why)),
        (None, Ok((_, card))) => {
            let joined = NcclRanks::over(Arc::clone(ranks), Arc::new(card))?;
            Ok(Ok(Background::over(Arc::new(joined))))
        }
    }
}

/// Why these ranks cannot use NCCL together; nothing where they can.
fn refused(ranks: &[Readiness]) -> Option<String> {
    let mut seen: Vec<([u8; 4], [u8; 16])> = Vec::new();
    for (rank, readiness) in ranks.iter().enumerate() {
        let (version, uuid) = match readiness {
            Readiness::Not(why) => return Some(format!("rank {rank}: {why}")),
            Readiness::Ready(version, uuid) => (*version, *uuid),
        };
        if let Some(first) = seen.first().filter(|first| first.0 != version) {
            let [first, version] = [first.0, version].map(|version| library::written(i32::from_le_bytes(version)));
            return Some(format!(
                "rank 0 has NCCL {first} and rank {rank} has {version}; install one version on all machines"
            ));
        }
        if let Some(other) = seen.iter().position(|other| other.1 == uuid) {
            return Some(format!(
                "ranks {other} and {rank} have the same GPU, which NCCL refuses; start no more ranks on a machine than it has GPUs, and \
                 name the first with `device: cuda`"
            ));
        }
        seen.push((version, uuid));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(version: i32, uuid: u8) -> Readiness {
        Readiness::Ready(version.to_le_bytes(), [uuid; 16])
    }

    #[test]
    fn ranks_with_one_version_and_a_gpu_each_can_and_others_are_told_why_not() {
        assert_eq!(refused(&[ready(22_105, 1), ready(22_105, 2)]), None);
        for (ranks, words) in [
            ([ready(22_105, 1), Readiness::Not("no library".into())], "rank 1: no library"),
            ([ready(22_105, 1), ready(21_903, 2)], "rank 0 has NCCL 2.21.5 and rank 1 has 2.19.3"),
            ([ready(22_105, 3), ready(22_105, 3)], "ranks 0 and 1 have the same GPU"),
        ] {
            let why = refused(&ranks).expect("refused");
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn what_a_rank_says_arrives_as_it_was_said() {
        for readiness in [ready(22_902, 7), Readiness::Not("no GPU".into())] {
            assert_eq!(Readiness::decode(&readiness.encode()), readiness);
        }
        assert!(matches!(Readiness::decode(&[]), Readiness::Not(_)));
        assert!(matches!(Readiness::decode(&[1, 2]), Readiness::Not(_)));
    }
}
