//! Which engine a node uses, and why.

use aenv_types::EngineKind;

use crate::{EngineError, EngineReport};

/// The setting `engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineSetting {
    /// Firecracker where it can be used, otherwise QEMU.
    Auto,
    /// This one or none.
    Only(EngineKind),
}

/// Chooses among what the engines say of themselves; the text says why, for the log and for `aenv doctor`.
pub fn choose(reports: &[EngineReport], setting: EngineSetting) -> Result<(EngineKind, String), EngineError> {
    let of = |kind: EngineKind| reports.iter().find(|report| report.kind == kind);
    match setting {
        EngineSetting::Only(kind) => match of(kind) {
            Some(report) if report.missing.is_empty() => {
                Ok((kind, format!("{} is set in the configuration and can be used", describe(report))))
            }
            other => Err(EngineError::Unusable(format!(
                "engine {kind:?} is set in the configuration but cannot be used: {}",
                why_not(other)
            ))),
        },
        EngineSetting::Auto => {
            let (first, second) = (of(EngineKind::Firecracker), of(EngineKind::Qemu));
            match (first, second) {
                (Some(report), _) if report.missing.is_empty() => {
                    Ok((EngineKind::Firecracker, format!("{} can be used", describe(report))))
                }
                (_, Some(report)) if report.missing.is_empty() => Ok((
                    EngineKind::Qemu,
                    format!("{} can be used; Firecracker cannot: {}", describe(report), why_not(first)),
                )),
                _ => Err(EngineError::Unusable(format!(
                    "no engine can be used here. QEMU: {}. Firecracker: {}",
                    why_not(second),
                    why_not(first)
                ))),
            }
        }
    }
}

fn describe(report: &EngineReport) -> String {
    let version = report.version.as_deref().unwrap_or("of unknown version");
    match report.virtualization {
        Some(how) => format!("{:?} {version} with {how:?}", report.kind),
        None => format!("{:?} {version}", report.kind),
    }
}

fn why_not(report: Option<&EngineReport>) -> String {
    match report {
        None => "this build does not have it".to_owned(),
        Some(report) => {
            let each =
                report.missing.iter().map(|missing| format!("{} (mend: {})", missing.what, missing.mend));
            each.collect::<Vec<_>>().join("; ")
        }
    }
}

#[cfg(test)]
mod tests {
    use aenv_types::Virtualization;

    use super::*;
    use crate::Missing;

    fn report(kind: EngineKind, missing: &[&str]) -> EngineReport {
        let missing = missing.iter().map(|what| Missing { what: (*what).to_owned(), mend: "m".to_owned() });
        EngineReport {
            kind,
            version: Some("1.0".to_owned()),
            virtualization: Some(Virtualization::Tcg),
            missing: missing.collect(),
        }
    }

    #[test]
    fn auto_takes_firecracker_first_and_says_why_not() {
        let good = [report(EngineKind::Firecracker, &[]), report(EngineKind::Qemu, &[])];
        assert_eq!(choose(&good, EngineSetting::Auto).unwrap().0, EngineKind::Firecracker);
        let no_kvm = [report(EngineKind::Firecracker, &["no KVM"]), report(EngineKind::Qemu, &[])];
        let (kind, reason) = choose(&no_kvm, EngineSetting::Auto).unwrap();
        assert_eq!(kind, EngineKind::Qemu);
        assert!(reason.contains("no KVM"), "{reason}");
        let none = [report(EngineKind::Qemu, &["no binary"])];
        let error = choose(&none, EngineSetting::Auto).unwrap_err().to_string();
        assert!(error.contains("no binary") && error.contains("does not have it"), "{error}");
    }

    #[test]
    fn a_set_engine_is_never_replaced() {
        let reports = [report(EngineKind::Firecracker, &["no KVM"]), report(EngineKind::Qemu, &[])];
        assert!(choose(&reports, EngineSetting::Only(EngineKind::Firecracker)).is_err());
        let (kind, _) = choose(&reports, EngineSetting::Only(EngineKind::Qemu)).unwrap();
        assert_eq!(kind, EngineKind::Qemu);
    }
}
