//! Byte sizes as people write them: `8GiB`, `500MB`, plain bytes.

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let trimmed = text.trim();
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, size)| {
                let at = trimmed.len().checked_sub(name.len())?;
                let (number, suffix) = (trimmed.get(..at)?, trimmed.get(at..)?);
                suffix.eq_ignore_ascii_case(name).then_some((number.trim(), *size))
            })
            .unwrap_or((trimmed, 1));
        match number.parse::<f64>() {
            Ok(n) if n.is_finite() && n >= 0.0 => Ok(Self((n * unit as f64) as u64)),
            _ => Err(format!(
                "invalid size {text:?}; expected bytes or a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, as in \
                 8GiB"
            )),
        }
    }
}

impl fmt::Display for Bytes {
    /// The largest binary unit that leaves at least one, to three digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[..4].iter().find(|(_, size)| self.0 >= *size);
        match unit {
            Some((name, size)) => {
                let value = self.0 as f64 / *size as f64;
                let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
                write!(f, "{value:.digits$} {name}")
            }
            None => write!(f, "{} B", self.0),
        }
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size such as 8GiB or plain bytes")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Bytes, E> {
                u64::try_from(bytes).map(Bytes).map_err(|_| E::custom("a size is not negative"))
            }

            fn visit_f64<E: de::Error>(self, bytes: f64) -> Result<Bytes, E> {
                if bytes.is_finite() && bytes >= 0.0 {
                    Ok(Bytes(bytes as u64))
                } else {
                    Err(E::custom("a size is a finite number, not negative"))
                }
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// Pattern of sizes in the schema of configurations.
#[cfg(feature = "schema")]
const SIZE: &str = r"^\s*[0-9][0-9.eE+]*\s*(([kKmMgGtT][iI]?)?[bB])?\s*$";

#[cfg(feature = "schema")]
macro_rules! size_schema {
    ($Size:ident, $number:literal, $pattern:expr, $examples:expr) => {
        impl schemars::JsonSchema for $Size {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($Size).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({
                    "type": [$number, "string"], "minimum": 0, "pattern": $pattern, "examples": $examples
                })
            }
        }
    };
}

#[cfg(feature = "schema")]
size_schema!(Bytes, "number", SIZE, ["8GiB"]);
#[cfg(feature = "schema")]
size_schema!(Budget, "integer", format!(r"{SIZE}|^\s*[aA][uU][tT][oO]\s*$"), ["8GiB", "auto"]);

/// A budget of device bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Budget {
    /// Available memory on the CPU, the capacity of a GPU.
    Auto,
    /// A number of bytes.
    Bytes(Bytes),
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().eq_ignore_ascii_case("auto") {
            return Ok(Self::Auto);
        }
        text.parse().map(Self::Bytes)
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str("auto"),
            Self::Bytes(bytes) => bytes.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Number(u64),
            Text(String),
        }
        match Raw::deserialize(deserializer)? {
            Raw::Number(bytes) => Ok(Self::Bytes(Bytes(bytes))),
            Raw::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("8GiB", 8 << 30),
            ("1.5 gib", 3 << 29),
            ("500MB", 500_000_000),
            ("4096", 4096),
            ("12 B", 12),
            ("64KiB", 65536),
        ] {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes), "{text}");
        }
        assert!("8 parsecs".parse::<Bytes>().unwrap_err().contains("8GiB"));
        assert!("-1GiB".parse::<Bytes>().is_err());
        assert_eq!("auto".parse::<Budget>().unwrap(), Budget::Auto);
    }

    #[test]
    fn sizes_are_shown_in_three_digits() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (15 << 20, "15.0 MiB"), (333 << 30, "333 GiB")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
