//! Numbers at the precision of a report.

use serde::{Serialize, Serializer};

/// Significant digits of a number in a report.
const DIGITS: usize = 6;

/// Integers up to this are exact in an f64, and are written as integers.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// A number of six significant digits; `None` for values that JSON cannot represent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Number(Option<f64>);

impl Number {
    /// Rounds a number. NaN and infinities become `None`.
    pub fn new(value: f64) -> Self {
        let rounded = value.is_finite().then(|| {
            let text = format!("{value:.*e}", DIGITS - 1);
            text.parse().unwrap_or(value)
        });
        Self(rounded)
    }
}

impl From<Option<f64>> for Number {
    fn from(value: Option<f64>) -> Self {
        value.map_or(Self(None), Self::new)
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => serializer.serialize_none(),
            // without the `.0` that a float would have
            Some(value) if value.fract() == 0.0 && value.abs() < MAX_EXACT => serializer.serialize_i64(value as i64),
            Some(value) => serializer.serialize_f64(value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Number;

    #[test]
    fn a_number_has_six_digits_and_is_as_short_as_they_allow() {
        let written = |value: f64| serde_json::to_string(&Number::new(value)).unwrap();
        assert_eq!(written(0.123_456_789), "0.123457");
        assert_eq!(written(-1.234_567_89e-9), "-1.23457e-9");
        assert_eq!(written(1_234_567.8), "1234570");
        assert_eq!(written(3.0), "3");
        assert_eq!(written(f64::NAN), "null");
        assert_eq!(written(f64::INFINITY), "null");
    }
}
