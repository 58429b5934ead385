//! Whether all ranks can use NCCL: each says what it has, and all come to the same answer.

use super::super::{Background, Collective, Result};
use super::card::Card;
use super::library;
use super::ranks::{NcclRanks, staged};
use burn::tensor::Device;
use std::sync::Arc;

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    /// NCCL's version and what tells its GPU from others.
    Ready([u8; 4], [u8; 16]),
    /// Why it cannot.
    Not(String),
}

impl Said {
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
        let card = Card::of(device)?;
        Ok((library.version, card))
    });
    let own = match &opened {
        Ok((version, card)) => Said::Ready(version.to_le_bytes(), card.uuid),
        Err(why) => Said::Not(why.clone()),
    };
    let all = ranks.exchange(own.encode())?;
    let all: Vec<Said> = all.iter().map(|bytes| Said::decode(bytes)).collect();
    match (refused(&all), opened) {
        (Some(why), _) | (None, Err(why)) => Ok(Err(why)),
        (None, Ok((_, card))) => {
            let joined = NcclRanks::over(Arc::clone(ranks), Arc::new(card))?;
            Ok(Ok(Background::over(Arc::new(joined))))
        }
    }
}

/// Why these ranks cannot use NCCL together; nothing where they can.
fn refused(all: &[Said]) -> Option<String> {
    let mut seen: Vec<([u8; 4], [u8; 16])> = Vec::new();
    for (rank, said) in all.iter().enumerate() {
        let own = match said {
            Said::Not(why) => return Some(format!("rank {rank}: {why}")),
            Said::Ready(version, uuid) => (*version, *uuid),
        };
        if let Some(first) = seen.first().filter(|first| first.0 != own.0) {
            let [first, own] = [first, &own].map(|(version, _)| library::written(i32::from_le_bytes(*version)));
            return Some(format!(
                "rank 0 has NCCL {first} and rank {rank} has {own}; install one version on all machines"
            ));
        }
        if let Some(other) = seen.iter().position(|other| other.1 == own.1) {
            return Some(format!(
                "ranks {other} and {rank} have the same GPU, which NCCL refuses; start no more ranks on a machine than it has GPUs, and \
                 name the first with `device: cuda`"
            ));
        }
        seen.push(own);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(version: i32, uuid: u8) -> Said {
        Said::Ready(version.to_le_bytes(), [uuid; 16])
    }

    #[test]
    fn ranks_with_one_version_and_a_gpu_each_can_and_others_are_told_why_not() {
        assert_eq!(refused(&[ready(22_105, 1), ready(22_105, 2)]), None);
        for (all, words) in [
            ([ready(22_105, 1), Said::Not("no library".into())], "rank 1: no library"),
            ([ready(22_105, 1), ready(21_903, 2)], "rank 0 has NCCL 2.21.5 and rank 1 has 2.19.3"),
            ([ready(22_105, 3), ready(22_105, 3)], "ranks 0 and 1 have the same GPU"),
        ] {
            let why = refused(&all).expect("refused");
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn what_a_rank_says_arrives_as_it_was_said() {
        for said in [ready(22_902, 7), Said::Not("no GPU".into())] {
            assert_eq!(Said::decode(&said.encode()), said);
        }
        assert!(matches!(Said::decode(&[]), Said::Not(_)));
        assert!(matches!(Said::decode(&[1, 2]), Said::Not(_)));
    }
}
