//! A calibrated profile on disk: JSON to be read again, or Rust source to be embedded.

use anyhow::{Context, Result};
use hugemm_clear::{Best, Crossover, Mbps, Primitive, Profile};
use serde_json::{Value, json};
use std::path::Path;

/// The profile as JSON. Crossovers are in bytes; `null` is never.
fn to_json(profile: &Profile) -> Result<String> {
    let pair = |best: Best| json!({ "general": best.general.name(), "any": best.any.name() });
    let from = |bytes: u64| (bytes != u64::MAX).then_some(bytes);
    let Profile { cached, bulk, crossover, cached_mbps, bulk_mbps } = profile;
    let Crossover { hot, hot_touched, cold, cold_touched } = crossover;
    let saved = json!({
        "cached": pair(*cached),
        "bulk": bulk.map(pair),
        "crossover": {
            "hot": from(*hot), "hot_touched": from(*hot_touched), "cold": from(*cold), "cold_touched": from(*cold_touched),
        },
        "cached_mbps": cached_mbps.any,
        "bulk_mbps": bulk_mbps.any,
        "cached_general_mbps": cached_mbps.general,
        "bulk_general_mbps": bulk_mbps.general,
    });
    Ok(serde_json::to_string_pretty(&saved)? + "\n")
}

fn from_json(text: &str) -> Result<Profile> {
    let saved: Value = serde_json::from_str(text)?;
    let best = |pair: &Value| -> Result<Best> {
        let named = |which| {
            let name = pair[which].as_str().with_context(|| format!("no primitive '{which}'"))?;
            Primitive::from_name(name).with_context(|| format!("no primitive is called '{name}'"))
        };
        Ok(Best { general: named("general")?, any: named("any")? })
    };
    let crossovers = saved["crossover"].as_object().context("no crossovers")?;
    let size = |case| crossovers.get(case).and_then(Value::as_u64).unwrap_or(u64::MAX);
    let speed = |name| saved[name].as_u64().and_then(|mbps| u32::try_from(mbps).ok());
    // Files of older versions do not have those without vector registers: not measured.
    let mbps = |any, general| -> Result<Mbps> {
        Ok(Mbps { general: speed(general).unwrap_or(0), any: speed(any).with_context(|| format!("no {any}"))? })
    };
    Ok(Profile {
        cached: best(&saved["cached"])?,
        bulk: if saved["bulk"].is_null() { None } else { Some(best(&saved["bulk"])?) },
        crossover: Crossover {
            hot: size("hot"),
            hot_touched: size("hot_touched"),
            cold: size("cold"),
            cold_touched: size("cold_touched"),
        },
        cached_mbps: mbps("cached_mbps", "cached_general_mbps")?,
        bulk_mbps: mbps("bulk_mbps", "bulk_general_mbps")?,
    })
}

fn to_rust(profile: &Profile) -> String {
    format!(
        "use hugemm_clear::Primitive::*;\nuse hugemm_clear::{{Best, Crossover, Mbps, Profile}};\n\n\
         /// Measured by `hugemm probe`; {} is never.\npub const PROFILE: Profile = {profile:#?};\n",
        u64::MAX
    )
}

pub fn save(path: &Path, profile: &Profile) -> Result<()> {
    let text = if path.extension().is_some_and(|e| e == "rs") { to_rust(profile) } else { to_json(profile)? };
    std::fs::write(path, text).with_context(|| format!("cannot write the profile to {}", path.display()))
}

pub fn load(path: &Path) -> Result<Profile> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read the profile {}; make one with `hugemm probe --save-profile FILE`", path.display())
    })?;
    from_json(&text)
        .with_context(|| format!("{} is no profile; make one with `hugemm probe --save-profile {0}`", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        Profile {
            cached: Best::only(Primitive::RepStosb),
            bulk: Some(Best { general: Primitive::Movnti, any: Primitive::Avx2Stream }),
            crossover: Crossover { hot: 8 << 20, hot_touched: u64::MAX, cold: 4096, cold_touched: 1 << 20 },
            cached_mbps: Mbps::only(15_000),
            bulk_mbps: Mbps { general: 20_000, any: 48_000 },
        }
    }

    #[test]
    fn json_leads_back() {
        for p in [profile(), Profile { bulk: None, ..profile() }] {
            assert_eq!(from_json(&to_json(&p).expect("json")).expect("profile"), p);
        }
        // A file of an older version: what it does not say was not measured.
        let old: String = to_json(&profile()).expect("json").replace("general_mbps", "unknown_mbps");
        assert_eq!(from_json(&old).expect("profile").bulk_mbps, Mbps { general: 0, any: 48_000 });
        assert!(from_json("{}").is_err());
        assert!(from_json(&to_json(&profile()).expect("json").replace("movnti", "movntx")).is_err());
    }

    #[test]
    fn rust_names_every_field() {
        let text = to_rust(&profile());
        for part in [
            "general: RepStosb,\n",
            "any: Avx2Stream,\n",
            "hot_touched: 18446744073709551615,\n",
            "bulk_mbps: Mbps {\n        general: 20000,\n        any: 48000,\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
