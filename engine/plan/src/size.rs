//! Byte sizes as people write them: `8GiB`, `500MB`, plain bytes.

use serde::{Deserialize, Serialize};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "Written")]
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

/// A size as files write it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a size such as 8GiB or plain bytes")]
enum Written {
    Number(u64),
    Real(f64),
    Text(String),
}

impl TryFrom<Written> for Bytes {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Number(bytes) => Ok(Self(bytes)),
            Written::Real(bytes) if bytes.is_finite() && bytes >= 0.0 => Ok(Self(bytes as u64)),
            Written::Real(_) => Err("a size is a finite number, not negative".into()),
            Written::Text(text) => text.parse(),
        }
    }
}

/// Pattern of sizes in the schema of configurations.
const SIZE: &str = r"^\s*[0-9][0-9.eE+]*\s*(([kKmMgGtT][iI]?)?[bB])?\s*$";

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

size_schema!(Bytes, "number", SIZE, ["8GiB"]);
size_schema!(Budget, "integer", format!(r"{SIZE}|^\s*[aA][uU][tT][oO]\s*$"), ["8GiB", "auto"]);

/// A budget of device bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "Written", rename_all = "snake_case")]
pub enum Budget {
    /// Available memory on the CPU, the capacity of a GPU.
    Auto,
    /// A number of bytes.
    #[serde(untagged)]
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

impl TryFrom<Written> for Budget {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Text(text) => text.parse(),
            number => number.try_into().map(Self::Bytes),
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
