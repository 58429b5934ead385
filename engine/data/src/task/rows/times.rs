//! Dates, times and durations as Python's `str` writes them.

use arrow_array::Array;
use arrow_array::cast::AsArray;
use arrow_array::types::{IntervalDayTimeType, IntervalMonthDayNanoType, IntervalYearMonthType};
use arrow_schema::{DataType, IntervalUnit, TimeUnit};
use jiff::fmt::temporal::DateTimeParser;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};

const SECOND: i128 = 1_000_000_000;
const DAY: i128 = 86_400 * SECOND;

/// Nanoseconds of a unit.
fn nanoseconds(unit: TimeUnit) -> i128 {
    match unit {
        TimeUnit::Second => SECOND,
        TimeUnit::Millisecond => 1_000_000,
        TimeUnit::Microsecond => 1000,
        TimeUnit::Nanosecond => 1,
    }
}

/// An entry of a column of times, durations or intervals.
pub(super) fn text(column: &dyn Array, at: usize) -> Result<String, String> {
    let data = column.to_data();
    let count = |unit: &TimeUnit| i128::from(data.buffer::<i64>(0)[at]) * nanoseconds(*unit);
    Ok(match column.data_type() {
        DataType::Timestamp(unit, zone) => timestamp(count(unit), zone.as_deref())?,
        DataType::Time32(unit) => time(i128::from(data.buffer::<i32>(0)[at]) * nanoseconds(*unit), 2),
        DataType::Time64(unit) => time(count(unit), 2),
        DataType::Duration(unit) => duration(count(unit)),
        DataType::Interval(IntervalUnit::YearMonth) => {
            format!("{} months", column.as_primitive::<IntervalYearMonthType>().value(at))
        }
        DataType::Interval(IntervalUnit::DayTime) => {
            let interval = column.as_primitive::<IntervalDayTimeType>().value(at);
            duration(i128::from(interval.days) * DAY + i128::from(interval.milliseconds) * 1_000_000)
        }
        DataType::Interval(IntervalUnit::MonthDayNano) => {
            let interval = column.as_primitive::<IntervalMonthDayNanoType>().value(at);
            let rest = duration(i128::from(interval.days) * DAY + i128::from(interval.nanoseconds));
            format!("{} months, {rest}", interval.months)
        }
        other => return Err(format!("{other} is no time")),
    })
}

/// The date of a day, counted from 1970-01-01.
pub(super) fn date(day: i64) -> Result<String, String> {
    let span = i32::try_from(day).ok().and_then(|day| 0.days().try_days(day).ok());
    let date = span.and_then(|span| jiff::civil::date(1970, 1, 1).checked_add(span).ok());
    date.map(|date| date.to_string()).ok_or_else(|| format!("day {day} from 1970-01-01 is beyond the year 9999"))
}

/// A time since 1970, in a zone if it has one.
fn timestamp(nanoseconds: i128, zone: Option<&str>) -> Result<String, String> {
    let instant = Timestamp::from_nanosecond(nanoseconds)
        .map_err(|_| format!("{nanoseconds} ns from 1970-01-01 is beyond the year 9999"))?;
    let local = match zone {
        None | Some("UTC") => instant.to_zoned(TimeZone::UTC),
        Some(name) => instant.to_zoned(DateTimeParser::new().parse_time_zone(name).map_err(|_| {
            format!("the time zone {name:?} is not known on this machine; install tzdata or convert it to UTC")
        })?),
    };
    let offset = zone.map(|_| local.strftime("%:z").to_string()).unwrap_or_default();
    Ok(format!("{}{}{offset}", local.strftime("%Y-%m-%d %H:%M:%S"), fraction(nanoseconds.rem_euclid(SECOND))))
}

/// A time of the day, with at least `digits` digits of the hour.
fn time(nanoseconds: i128, digits: usize) -> String {
    let seconds = nanoseconds / SECOND;
    let [hours, minutes, seconds] = [seconds / 3600, seconds / 60 % 60, seconds % 60];
    format!("{hours:0digits$}:{minutes:02}:{seconds:02}{}", fraction(nanoseconds % SECOND))
}

/// As `timedelta`: days may be negative, the rest is not.
fn duration(nanoseconds: i128) -> String {
    let (days, rest) = (nanoseconds.div_euclid(DAY), nanoseconds.rem_euclid(DAY));
    let rest = time(rest, 1);
    match days {
        0 => rest,
        1 | -1 => format!("{days} day, {rest}"),
        _ => format!("{days} days, {rest}"),
    }
}

/// The fraction of a second: empty, microseconds, or nanoseconds if needed.
fn fraction(nanoseconds: i128) -> String {
    match nanoseconds {
        0 => String::new(),
        fraction if fraction % 1000 == 0 => format!(".{:06}", fraction / 1000),
        fraction => format!(".{fraction:09}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `str` of pyarrow's `as_py()`, and of pandas for nanoseconds.
    #[test]
    fn times_are_written_as_pythons_str_writes_them() {
        let moment = 1_767_323_045 * SECOND;
        let at = |more: i128, zone| timestamp(moment + more, zone).unwrap();
        assert_eq!(at(0, None), "2026-01-02 03:04:05");
        assert_eq!(at(120_000, None), "2026-01-02 03:04:05.000120");
        assert_eq!(at(1, None), "2026-01-02 03:04:05.000000001");
        assert_eq!(at(0, Some("UTC")), "2026-01-02 03:04:05+00:00");
        assert_eq!(at(0, Some("+05:30")), "2026-01-02 08:34:05+05:30");
        assert_eq!(at(0, Some("-03:30")), "2026-01-01 23:34:05-03:30");
        assert_eq!(timestamp(-1000, None).unwrap(), "1969-12-31 23:59:59.999999");
        assert!(timestamp(moment, Some("Nowhere/Town")).unwrap_err().contains("Nowhere/Town"));
        assert_eq!(
            [date(0).unwrap(), date(20_455).unwrap(), date(-1).unwrap()],
            ["1970-01-01", "2026-01-02", "1969-12-31"]
        );
        assert!(date(i64::MAX).is_err() && date(100_000_000).is_err());
        assert_eq!(time(11_045 * SECOND + 7000, 2), "03:04:05.000007");
        for (nanoseconds, text) in [
            (0, "0:00:00"),
            (DAY + 7200 * SECOND, "1 day, 2:00:00"),
            (-SECOND, "-1 day, 23:59:59"),
            (3 * DAY + 1_500_000, "3 days, 0:00:00.001500"),
        ] {
            assert_eq!(duration(nanoseconds), text);
        }
    }
}
