//! Weights from safetensors: one file or shards behind an index, memory-mapped, checked exactly.

use super::bitsandbytes::{self, NEEDS_BASE, NOT_READ, RawTensor};
use super::json::read_object;
use super::tensor_names::{EMBEDDING, HEAD, check_names, is_outer_tensor, unnested};
use super::{ignored, mxfp4};
use crate::decoder::{NewParam, RankShard, fresh_head};
use crate::unit::{ParamSpec, chain, unit_specs};
use crate::{Arch, Decoder, Error, Result};
use burn::tensor::Device;
use firebrick_backends::PrecisionExt;
use firebrick_backends::allocation_limit::{AllocationLimit, limited};
use firebrick_backends::heartbeat::beat;
use firebrick_backends::host::MappedFile;
use firebrick_spec::{BaseFormat, file};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Longest header of a file in bytes, as in the `safetensors` crate.
const MAX_HEADER: u64 = 100_000_000;
/// What a header may take as values.
const HEADER_LIMIT: AllocationLimit = AllocationLimit::total(192 << 20);

/// Element type of a tensor in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredDtype {
    /// 32-bit float.
    F32,
    /// bfloat16.
    BF16,
    /// IEEE half.
    F16,
}

impl StoredDtype {
    /// The type by safetensors' name.
    pub(super) fn on_disk(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::BF16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }
}

/// A mapped safetensors file with its header read.
pub(super) struct WeightFile {
    pub path: PathBuf,
    map: MappedFile,
    data_start: usize,
    metadata: Metadata,
}

impl WeightFile {
    pub(super) fn open(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let map = file::inside(dir, name).and_then(|path| MappedFile::open(&path)).map_err(Error::io("read", &path))?;
        let header =
            limited(HEADER_LIMIT, &format!("reading the header of {}", path.display()), || header(map.bytes()));
        let (data_start, metadata) = header.map_err(|detail| Error::Safetensors { path: path.clone(), detail })?;
        let found = map.bytes().len() as u64;
        let ends = metadata.tensors().into_iter().map(|(name, info)| (info.data_offsets.1, name));
        // the first tensor that is cut off, so that the message does not depend on map order
        let cut = ends.filter(|(end, _)| (data_start + end) as u64 > found).min();
        match cut {
            Some((end, tensor)) => Err(Error::Truncated { path, tensor, end: (data_start + end) as u64, found }),
            None => Ok(Self { path, map, data_start, metadata }),
        }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        self.metadata.tensors().into_keys()
    }

    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// A tensor as it is stored.
    fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        self.metadata.info(name).map(|info| self.raw_of(info))
    }

    fn raw_of<'a>(&'a self, info: &'a TensorInfo) -> RawTensor<'a> {
        beat();
        let (start, end) = info.data_offsets;
        let bytes = &self.map.bytes()[self.data_start + start..self.data_start + end];
        RawTensor { dtype: info.dtype, shape: &info.shape, bytes }
    }

    pub(super) fn values(&self, spec: &ParamSpec, info: &TensorInfo) -> Result<Vec<f32>> {
        if info.shape != spec.shape {
            return Err(Error::WrongShape {
                path: self.path.clone(),
                tensor: spec.name.clone(),
                expected: spec.shape.clone(),
                found: info.shape.clone(),
            });
        }
        floats(&self.path, &spec.name, &self.raw_of(info))
    }
}

/// The numbers of a tensor.
fn floats(path: &Path, name: &str, raw: &RawTensor<'_>) -> Result<Vec<f32>> {
    let pairs = raw.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    Ok(match stored(path, name, raw.dtype)? {
        StoredDtype::F32 => raw.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        StoredDtype::BF16 => pairs.map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        StoredDtype::F16 => pairs.map(|b| f16::from_le_bytes(b).to_f32()).collect(),
    })
}

/// True if two tensors have the same shape and numbers, in one element type.
pub(super) fn same(a: &RawTensor<'_>, b: &RawTensor<'_>) -> bool {
    a.shape == b.shape && a.dtype == b.dtype && a.bytes == b.bytes
}

/// Offset of the data, and the header. The crate's own reader refuses a file that is cut off without naming the tensor,
/// so the header is read here.
fn header(bytes: &[u8]) -> Result<(usize, Metadata), String> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(format!("it has {} bytes, too few for a header", bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(format!("the header length is {length} bytes, expected at most {MAX_HEADER}"));
    }
    let json = usize::try_from(length)
        .ok()
        .and_then(|n| rest.get(..n))
        .ok_or_else(|| format!("the header length is {length} bytes, but only {} follow", rest.len()))?;
    let metadata = serde_json::from_slice(json).map_err(|e| format!("the header is invalid: {e}"))?;
    Ok((8 + json.len(), metadata))
}

fn stored(path: &Path, tensor: &str, dtype: Dtype) -> Result<StoredDtype> {
    match dtype {
        Dtype::F32 => Ok(StoredDtype::F32),
        Dtype::BF16 => Ok(StoredDtype::BF16),
        Dtype::F16 => Ok(StoredDtype::F16),
        other => Err(Error::UnsupportedDtype {
            path: path.to_owned(),
            tensor: tensor.to_owned(),
            found: format!("{other:?}"),
        }),
    }
}

/// Place of a tensor: the file, and its name there.
struct Place {
    file: usize,
    name: String,
}

/// A tensor that is written as it was read.
pub(super) struct OuterTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: u64,
}

/// The tensors around the language model in a folder.
pub(super) fn outer_tensors(dir: &Path) -> Result<Vec<OuterTensor>> {
    let folder = Folder::read(dir)?;
    let outer = folder.names().filter(|name| is_outer_tensor(name));
    let described = |name: &String| {
        let RawTensor { dtype, shape, bytes } = folder.raw(name)?;
        Some(OuterTensor { name: name.clone(), dtype, shape: shape.to_vec(), bytes: bytes.len() as u64 })
    };
    Ok(outer.filter_map(described).collect())
}

/// The bytes of one of them.
pub(super) fn outer_tensor_bytes(dir: &Path, name: &str) -> Result<Vec<u8>> {
    let folder = Folder::read(dir)?;
    let missing = || Error::MissingTensor { path: dir.to_owned(), tensor: name.to_owned(), count: 1 };
    folder.raw(name).map(|tensor| tensor.bytes.to_vec()).ok_or_else(missing)
}

/// Opens the folder's weight files and says where each tensor is.
fn open(dir: &Path) -> Result<(Vec<WeightFile>, BTreeMap<String, Place>)> {
    let names: Vec<String> = if dir.join(SINGLE).is_file() {
        vec![SINGLE.into()]
    } else if let Some(index) = read_object(dir, INDEX)? {
        let bad = |detail: &str| Error::Config { path: dir.join(INDEX), detail: detail.into() };
        let map = index
            .get("weight_map")
            .and_then(|m| m.as_object())
            .ok_or_else(|| bad("`weight_map` is missing; it must map each tensor to a file"))?;
        let files: Option<BTreeSet<String>> = map.values().map(|v| v.as_str().map(str::to_owned)).collect();
        files.ok_or_else(|| bad("the values of `weight_map` must be file names"))?.into_iter().collect()
    } else {
        return Err(Error::MissingFile {
            dir: dir.to_owned(),
            file: format!("{SINGLE} (nor {INDEX})"),
            hint: "only safetensors weights are supported; convert other formats with transformers' save_pretrained"
                .into(),
        });
    };
    let files = names.iter().map(|name| WeightFile::open(dir, name)).collect::<Result<Vec<_>>>()?;
    let places = files.iter().enumerate().flat_map(|(file, f)| {
        f.names().map(move |name| {
            let key = name.clone();
            (key, Place { file, name })
        })
    });
    let (places, seeing) = unnested(places.collect());
    if seeing > 0 {
        tracing::debug!("{}: skipped {seeing} tensors of the parts that see images", dir.display());
    }
    let mut place: BTreeMap<String, Place> = BTreeMap::new();
    for (name, location) in places {
        let Some(first) = place.get(&name) else {
            place.insert(name, location);
            continue;
        };
        // a tensor in two files, or under two names
        let [one, other] = [first, &location].map(|location| files[location.file].raw(&location.name));
        if !one.zip(other).is_some_and(|(one, other)| same(&one, &other)) {
            let [one, other] = [first, &location]
                .map(|location| format!("{} in {}", location.name, files[location.file].path.display()));
            return Err(Error::Config {
                path: dir.to_owned(),
                detail: format!("has two tensors for {name} that differ: {one}, and {other}; remove one"),
            });
        }
    }
    Ok((files, place))
}

/// The weight files of a folder.
pub(super) struct Folder<'a> {
    pub(super) dir: &'a Path,
    files: Vec<WeightFile>,
    place: BTreeMap<String, Place>,
}

impl<'a> Folder<'a> {
    fn read(dir: &'a Path) -> Result<Self> {
        let (files, place) = open(dir)?;
        Ok(Self { dir, files, place })
    }

    pub(super) fn open(dir: &'a Path, arch: &Arch) -> Result<Self> {
        let Self { files, mut place, .. } = Self::read(dir)?;
        // of a tied pair a file may have either
        if arch.tied
            && !place.contains_key(EMBEDDING)
            && let Some(head) = place.remove(HEAD)
        {
            place.insert(EMBEDDING.to_owned(), head);
        }
        Ok(Self { dir, files, place })
    }

    /// The names of its tensors, as a language model by itself has them.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.place.keys()
    }

    /// The numbers of a tensor; none where there is no such tensor, or no floats.
    pub(super) fn floats(&self, name: &str) -> Option<Vec<f32>> {
        floats(self.dir, name, &self.raw(name)?).ok()
    }

    /// A tensor by the name that it has in a language model by itself.
    pub(super) fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        let place = self.place.get(name)?;
        self.files[place.file].raw(&place.name)
    }

    /// True if bitsandbytes has quantised a weight.
    fn is_quantised(&self, weight: &str) -> bool {
        bitsandbytes::is_quantised(weight, |name| self.place.contains_key(name))
    }

    /// True if a matrix of experts is in MXFP4.
    fn is_mxfp4(&self, weight: &str) -> bool {
        mxfp4::is_quantised(weight, |name| self.place.contains_key(name))
    }

    /// The numbers of a matrix of experts in MXFP4.
    fn widened(&self, spec: &ParamSpec) -> Result<Vec<f32>> {
        let refuse =
            |detail: String| Error::QuantizedWeight { path: self.dir.to_owned(), tensor: spec.name.clone(), detail };
        let ([rows, input], &[experts, ..]) = (spec.rows_cols(), &spec.shape[..]) else {
            return Err(refuse("is in MXFP4, which is supported only for experts".into()));
        };
        let shape = [experts, rows / experts, input];
        let mut values = mxfp4::read(&spec.name, shape, |name| self.raw(name)).map_err(refuse)?;
        spec.untransposed_into_memory(&mut values);
        Ok(values)
    }

    /// The numbers of a parameter, one after the other, in their order in memory.
    fn values(&self, spec: &ParamSpec) -> Result<Vec<f32>> {
        if self.is_mxfp4(&spec.name) {
            return self.widened(spec);
        }
        let mut values = Vec::new();
        for part in spec.tensors() {
            let Place { file, name } = &self.place[&part.name];
            let file = &self.files[*file];
            let Some(info) = file.metadata.info(name) else { unreachable!("the name came from this file's header") };
            let part_values = file.values(&part, info)?;
            // a parameter that is one tensor is in memory once
            if values.is_empty() {
                values = part_values;
            } else {
                values.extend(part_values);
            }
        }
        spec.into_memory(&mut values);
        Ok(values)
    }

    /// A parameter: numbers in the model's precision, or the buffer of its layout. `quantised` says whether any weight
    /// of the folder is.
    fn param(&self, arch: &Arch, spec: &ParamSpec, quantised: bool, device: &Device) -> Result<NewParam> {
        let refuse =
            |detail: String| Error::QuantizedWeight { path: self.dir.to_owned(), tensor: spec.name.clone(), detail };
        let of_file = spec.tensors().iter().any(|part| self.is_quantised(&part.name));
        let Some(layout) = spec.layout(arch) else {
            return if of_file {
                let why = if spec.slot.is_linear() { NEEDS_BASE } else { NOT_READ };
                Err(refuse(why.into()))
            } else {
                let values = self.values(spec)?;
                Ok(arch.precision.matrix(values, spec.rows_cols(), device).into())
            };
        };
        match (of_file, layout.format) {
            (true, _) if spec.slot.is_expert() => Err(refuse(NOT_READ.into())),
            (true, BaseFormat::Nf4) => {
                let words = bitsandbytes::read(&spec.name, spec.rows_cols(), |name| self.raw(name));
                Ok(NewParam::verbatim(words.map_err(refuse)?, layout, device))
            }
            (true, BaseFormat::Int8) => Err(refuse(NEEDS_BASE.into())),
            (false, _) if quantised => Err(refuse(
                "is not quantized, but other matrices of the checkpoint are (for example because of \
                 llm_int8_skip_modules); use the checkpoint that it was made from, which is quantized when it is loaded"
                    .into(),
            )),
            (false, _) => Ok(NewParam::quantized(&self.values(spec)?, layout, device)),
        }
    }
}

/// Element types by tensor name: of a matrix that bitsandbytes has quantised the one that it had before, and BF16 of
/// one in MXFP4, which is what transformers widens it to.
pub(super) fn dtypes(dir: &Path, arch: &Arch) -> Result<BTreeMap<String, StoredDtype>> {
    let folder = Folder::open(dir, arch)?;
    let tensors =
        folder.place.iter().filter(|(name, _)| !is_outer_tensor(name) && bitsandbytes::weight_beside(name).is_none());
    let dtype = |(name, place): (&String, &Place)| {
        if folder.is_quantised(name) {
            let before = bitsandbytes::original_dtype(name, |name| folder.raw(name));
            let before = match before.as_deref() {
                Some("float32") => StoredDtype::F32,
                Some("float16") => StoredDtype::F16,
                _ => StoredDtype::BF16,
            };
            return Some(Ok((name.clone(), before)));
        }
        if let Some(matrix) = mxfp4::weight_of(name).filter(|weight| folder.is_mxfp4(weight)) {
            return Some(Ok((matrix.to_owned(), StoredDtype::BF16)));
        }
        let f = &folder.files[place.file];
        let dtype = f.metadata.info(&place.name)?.dtype;
        Some(stored(&f.path, name, dtype).map(|d| (name.clone(), d)))
    };
    tensors.filter_map(dtype).collect()
}

/// A rank's part of a model; with a seed, of a value model with its body: see [`Decoder::with_value_head`].
pub(super) fn load(
    dir: &Path,
    arch: &Arch,
    part: RankShard<'_>,
    value_head: Option<u64>,
    device: &Device,
) -> Result<Decoder> {
    let folder = Folder::open(dir, arch)?;
    check_names(dir, arch, &folder.place)?;
    let quantised = folder.place.keys().any(|name| folder.is_quantised(name));
    let specs = chain(arch).into_iter().flat_map(|unit| unit_specs(arch, unit));
    let stored: BTreeSet<String> = specs.map(|spec| spec.name).collect();
    let loaded = if value_head.is_some() { arch.clone().with_value_head() } else { arch.clone() };
    let decoder = Decoder::build_shard(loaded, part, device, |_, spec| match value_head {
        Some(seed) if !stored.contains(&spec.name) => Ok(fresh_head(arch, device, spec, seed).into()),
        _ => folder.param(arch, spec, quantised, device),
    })?;
    ignored::report(dir, arch)?;
    Ok(decoder)
}
