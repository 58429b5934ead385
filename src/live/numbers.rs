//! Formats of numbers.

/// A value to about three digits.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 {
        "0".into()
    } else if !(1e-3..1e5).contains(&size) {
        format!("{value:.1e}")
    } else if size >= 100.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 1.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

/// A fraction in percent.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A time in one or two units.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 0.1 => format!("{:.0} ms", seconds * 1e3),
        _ if seconds < 10.0 => format!("{seconds:.1} s"),
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86_400, whole / 3600 % 24),
    }
}

/// A whole number with a comma before every three digits.
pub fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{duration, grouped, number, percent};

    #[test]
    fn numbers_have_about_three_digits() {
        let written = [0.0, 0.8125, -1.234, 45.67, 1234.5, 1.2e-4, 3e6].map(number);
        assert_eq!(written, ["0", "0.812", "-1.23", "45.7", "1234", "1.2e-4", "3.0e6"]);
        assert_eq!(percent(0.125), "12.5 %");
    }

    #[test]
    fn times_have_one_or_two_units_and_large_counts_commas() {
        let written = [0.012, 0.42, 42.0, 125.0, 7_260.0, 100_000.0].map(duration);
        let wanted = ["12 ms", "0.4 s", "42 s", "2 min 5 s", "2 h 1 min", "1 d 3 h"];
        assert_eq!(written, wanted);
        assert_eq!([12.0, 1_234.0, 1_234_567.0].map(grouped), ["12", "1,234", "1,234,567"]);
    }
}
