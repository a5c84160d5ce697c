//! What Firecracker's API takes, in our own words, and a check of requests against it. Written down from the API description of
//! release 1.16; where `$FIRECRACKER_API` names such a description (`firecracker.yaml`), the table itself is checked against it.

use serde_json::Value;

/// One line of the table.
pub struct Entry {
    pub call: &'static str,
    /// Its body's name in the published description.
    pub body: &'static str,
    pub when: When,
    pub fields: &'static [Field],
}

/// When a request is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Until the machine runs, or a state was loaded.
    Before,
    /// Before anything else was asked.
    First,
    /// Once there is a machine.
    After,
}

pub struct Field {
    pub name: &'static str,
    pub kind: Kind,
    pub required: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Text,
    Whole,
    Flag,
    Object(&'static [&'static str]),
}

const fn must(name: &'static str, kind: Kind) -> Field {
    Field { name, kind, required: true }
}

const fn may(name: &'static str, kind: Kind) -> Field {
    Field { name, kind, required: false }
}

use Kind::{Flag, Object, Text, Whole};

/// What the engine may use. `*` stands for an id, which the body repeats.
pub const API: &[Entry] = &[
    Entry {
        call: "PUT /machine-config",
        body: "MachineConfiguration",
        when: When::Before,
        fields: &[
            must("vcpu_count", Whole),
            must("mem_size_mib", Whole),
            may("smt", Flag),
            may("track_dirty_pages", Flag),
        ],
    },
    Entry { call: "PUT /cpu-config", body: "CpuConfig", when: When::Before, fields: &[] },
    Entry {
        call: "PUT /boot-source",
        body: "BootSource",
        when: When::Before,
        fields: &[must("kernel_image_path", Text), may("initrd_path", Text), may("boot_args", Text)],
    },
    Entry {
        call: "PUT /drives/*",
        body: "Drive",
        when: When::Before,
        fields: &[
            must("drive_id", Text),
            must("is_root_device", Flag),
            may("path_on_host", Text),
            may("is_read_only", Flag),
            may("cache_type", Text),
            may("io_engine", Text),
        ],
    },
    Entry {
        call: "PUT /network-interfaces/*",
        body: "NetworkInterface",
        when: When::Before,
        fields: &[must("iface_id", Text), must("host_dev_name", Text), may("guest_mac", Text)],
    },
    Entry {
        call: "PUT /balloon",
        body: "Balloon",
        when: When::Before,
        fields: &[
            must("amount_mib", Whole),
            must("deflate_on_oom", Flag),
            may("stats_polling_interval_s", Whole),
            may("free_page_reporting", Flag),
        ],
    },
    Entry { call: "PUT /entropy", body: "EntropyDevice", when: When::Before, fields: &[] },
    Entry {
        call: "PUT /actions",
        body: "InstanceActionInfo",
        when: When::Before,
        fields: &[must("action_type", Text)],
    },
    Entry {
        call: "PUT /snapshot/load",
        body: "SnapshotLoadParams",
        when: When::First,
        fields: &[
            must("snapshot_path", Text),
            may("mem_backend", Object(&["backend_type", "backend_path"])),
            may("resume_vm", Flag),
        ],
    },
    Entry {
        call: "PUT /snapshot/create",
        body: "SnapshotCreateParams",
        when: When::After,
        fields: &[must("snapshot_path", Text), must("mem_file_path", Text), may("snapshot_type", Text)],
    },
    Entry { call: "PATCH /vm", body: "Vm", when: When::After, fields: &[must("state", Text)] },
    Entry {
        call: "PATCH /balloon",
        body: "BalloonUpdate",
        when: When::After,
        fields: &[must("amount_mib", Whole)],
    },
];

/// A request as the double printed it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub call: String,
    pub body: Value,
}

impl Request {
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(3, ' ');
        let (method, path, body) = (words.next()?, words.next()?, words.next()?);
        if !["GET", "PUT", "PATCH"].contains(&method) {
            return None;
        }
        let body = if body.is_empty() { Value::Null } else { serde_json::from_str(body).unwrap() };
        Some(Self { call: format!("{method} {path}"), body })
    }
}

/// Checks each request, and their order.
pub fn check(requests: &[Request]) {
    let mut there_is_a_machine = false;
    for (index, request) in requests.iter().enumerate() {
        if ["GET /", "GET /balloon"].contains(&request.call.as_str()) {
            assert!(request.body.is_null());
            continue;
        }
        let (entry, id) = find(&request.call);
        match entry.when {
            When::Before => assert!(!there_is_a_machine, "{} comes too late", request.call),
            When::First => assert_eq!(index, 0, "{} comes after others", request.call),
            When::After => assert!(there_is_a_machine, "{} comes too early", request.call),
        }
        check_body(request, entry, id);
        there_is_a_machine |= ["PUT /actions", "PUT /snapshot/load"].contains(&entry.call);
    }
}

fn find(call: &str) -> (&'static Entry, Option<&str>) {
    let found = API.iter().find_map(|entry| match entry.call.strip_suffix('*') {
        Some(prefix) => call.strip_prefix(prefix).map(|id| (entry, Some(id))),
        None => (entry.call == call).then_some((entry, None)),
    });
    found.unwrap_or_else(|| panic!("{call} is not in the table"))
}

fn check_body(request: &Request, entry: &Entry, id: Option<&str>) {
    let Request { call, body } = request;
    let body = body.as_object().unwrap_or_else(|| panic!("{call}: the body is no object"));
    for field in entry.fields.iter().filter(|field| field.required) {
        assert!(body.contains_key(field.name), "{call}: {} is missing", field.name);
    }
    for (name, value) in body.iter().filter(|_| entry.body != "CpuConfig") {
        let field = entry.fields.iter().find(|field| field.name == name);
        let field = field.unwrap_or_else(|| panic!("{call}: {name} is unknown"));
        let fits = match field.kind {
            Text => value.is_string(),
            Whole => value.is_u64(),
            Flag => value.is_boolean(),
            Object(names) => {
                let object = value.as_object().unwrap();
                object.len() == names.len() && names.iter().all(|name| object[*name].is_string())
            }
        };
        assert!(fits, "{call}: {name} is {value}");
    }
    if let Some(id) = id {
        let own = entry.fields.iter().find(|field| field.name.ends_with("_id")).unwrap();
        assert_eq!(body[own.name], id, "{call}");
    }
}

/// Checks the table against a published description, as far as it names these bodies. Reads only as much YAML as that takes.
pub fn check_table(description: &str) {
    for entry in API {
        let (method, path) = entry.call.split_once(' ').unwrap();
        let path = path.replace('*', "{");
        let at =
            description.find(&format!("\n  {path}")).unwrap_or_else(|| panic!("{path} is not described"));
        let rest = &description[at + 1..];
        let end = rest.match_indices("\n  /").next().map_or(rest.len(), |(end, _)| end);
        let method = format!("\n    {}:", method.to_lowercase());
        assert!(rest[..end].contains(&method), "{}", entry.call);

        let body = definition(description, entry.body);
        let required = list(&body, "    required:");
        for field in entry.fields {
            let name = field.name;
            let at = body.iter().position(|line| *line == format!("      {name}:"));
            let at = at.unwrap_or_else(|| panic!("{} has no {name}", entry.body));
            let described =
                body[at + 1..].iter().take_while(|line| line.starts_with("        ")).collect::<Vec<_>>();
            let says = |what: &str| described.iter().any(|line| line.trim_start().starts_with(what));
            let fits = match field.kind {
                Text => says("type: string"),
                Whole => says("type: integer"),
                Flag => says("type: boolean"),
                Object(_) => says("$ref"),
            };
            assert!(fits, "{} {name}: {described:?}", entry.body);
        }
        let own = entry.fields.iter().filter(|field| field.required).map(|field| field.name.to_owned());
        let own: std::collections::BTreeSet<String> = own.collect();
        assert_eq!(own, required.into_iter().collect(), "{}", entry.body);
    }
}

fn definition<'a>(description: &'a str, name: &str) -> Vec<&'a str> {
    let lines = description.lines().skip_while(|line| *line != "definitions:");
    let head = format!("  {name}:");
    let body = lines.skip_while(|line| *line != head).skip(1);
    body.take_while(|line| line.is_empty() || line.starts_with("    ")).collect()
}

fn list(body: &[&str], head: &str) -> Vec<String> {
    let items = body.iter().skip_while(|line| **line != head).skip(1);
    items.map_while(|line| line.strip_prefix("      - ").map(str::to_owned)).collect()
}
