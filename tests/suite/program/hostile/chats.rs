//! Chat templates that loop, recurse or grow.

use super::{Bench, Job, Kind, TERMINAL, any, nested, refused, write_sparse};

pub(super) const KINDS: &[Kind] = &[
    refused("a template that loops", Job::Chat, |bench, random| {
        let depth = 2 + random.below(4) as usize;
        let loops = nested("{% for i in range(99999) %}", "", "{% endfor %}", depth);
        template(bench, &loops)
    }),
    refused("a template that calls itself", Job::Chat, |bench, random| {
        let text = random.pick(&[
            "{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}",
            "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
            "{% include 'chat_template' %}",
            "{% extends 'chat_template' %}",
            "{% import 'chat_template' as m %}{{ m.a() }}",
            "{% for m in [[1]] recursive %}{{ loop([m]) }}{% endfor %}",
            "{% include '/etc/passwd' %}",
            "{% set ns = namespace(f=none) %}{% macro a() %}{{ ns.f() }}{% endmacro %}{% set ns.f = a %}{{ a() }}",
        ]);
        template(bench, text)
    }),
    refused("a template that doubles a text", Job::Chat, |bench, random| {
        let step = random.pick(&[
            "{% set ns.s = ns.s ~ ns.s %}",
            "{% set ns.s = ns.s + ns.s %}",
            "{% set ns.s = ns.s * 2 %}",
            "{% set ns.s = [ns.s, ns.s] | join %}",
            "{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}",
            "{% set ns.s = ns.s.replace('a', 'aa') %}",
            "{% set ns.s = '%s%s' | format(ns.s, ns.s) %}",
        ]);
        let text =
            format!("{{% set ns = namespace(s='aaaa') %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.s }}}}");
        template(bench, &text)
    }),
    any("a template that takes much at once", Job::Chat, |bench, random| {
        let text = random.pick(&[
            "{{ 'a' * 10000000000 }}",
            "{{ 'a' * 99999999 }}",
            "{{ ('a' * 99999999) ~ ('b' * 99999999) ~ ('c' * 99999999) }}",
            "{{ ([0] * 99999999) | list }}",
            "{{ ([0] * 99999999) | join(',') | length }}",
            "{{ ([0] * 99999999) | tojson }}",
            "{{ messages | tojson(indent=4000000000) }}",
            "{{ range(99999) | list | tojson(indent=99999) }}",
            "{{ 'a'.center(10000000000) }}",
            "{{ 'a' | indent(10000000000) }}",
            "{{ '%99999999999d' | format(1) }}",
            "{{ range(0, 100000000000) | length }}",
            "{{ 10 ** 1000000000 }}",
            "{{ 2 ** 200 // 0 }}",
            "{{ (1 / 0) | int }}",
            "{{ strftime_now('%A' * 9999999) }}",
            "{{ 'é' * 3 }}{{ 'é'[1:99999999999] }}{{ [1, 2][::-1][0] }}{{ 'a'[99999999999:] }}",
            "{{ [[1] * 9999] * 9999 }}",
            "{{ [3, 'a', none] | sort }}",
            "{{ dict(a=1, **messages[0]) }}",
        ]);
        template(bench, text)
    }),
    refused("a template that lists", Job::Chat, |bench, random| {
        let step = random.pick(&[
            "{% set ns.l = ns.l + ns.l %}",
            "{% set ns.l = [ns.l, ns.l] %}",
            "{% set ns.l = {'a': ns.l, 'b': ns.l} %}",
            "{% set ns.l = (ns.l, ns.l) %}",
        ]);
        let text = format!(
            "{{% set ns = namespace(l=[1, 2]) %}}{{% for i in range(70) %}}{step}{{% endfor %}}{{{{ ns.l }}}}{{{{ ns.l | tojson }}}}"
        );
        template(bench, &text)
    }),
    any("a template that is nested", Job::Chat, |bench, random| {
        let depth = random.power(8, 17);
        let text = match random.below(5) {
            0 => format!("{{{{ {} }}}}", nested("(", "1", ")", depth)),
            1 => format!("{{{{ {} }}}}", nested("[", "1", "]", depth)),
            2 => nested("{% if true %}", "x", "{% endif %}", depth),
            3 => format!("{{{{ {}1 }}}}", "-".repeat(depth)),
            _ => format!("{{{{ {}true }}}}", "not ".repeat(depth)),
        };
        template(bench, &text)
    }),
    any("terminal codes of a template", Job::Chat, |bench, random| {
        let codes = serde_json::to_string(TERMINAL).unwrap();
        let text = match random.below(3) {
            0 => format!("{{{{ raise_exception({codes}) }}}}"),
            1 => format!("{{{{ {codes} | nofilter }}}}"),
            _ => format!("{{% {TERMINAL} %}}"),
        };
        template(bench, &text)
    }),
    refused("size of a template", Job::Chat, |bench, random| {
        write_sparse(bench, "model/chat_template.jinja", random.power(28, 42) as u64);
        Vec::new()
    }),
];

fn template(bench: &Bench, text: &str) -> Vec<String> {
    bench.write("model/chat_template.jinja", text);
    Vec::new()
}
