//! Links the module against glibc 2.28, whatever the machine that builds it has, so that a wheel runs on any later one.
//!
//! A linker takes a function's newest version in the C library it finds. Here it finds libraries of one object each before
//! the system's: they name the functions that got a newer version since 2.28 with the one they had then, and no program
//! ever runs them. Where they cannot be made, the build goes on with what the system has.

use std::{env, fmt::Write as _, fs, io, path::Path, process::Command};

/// A library: its file for the linker, its name for the loader, and the functions with their versions.
type Library = (&'static str, &'static str, &'static [(&'static str, &'static str)]);

const LIBRARIES: [Library; 3] = [
    (
        "libpthread.so",
        "libpthread.so.0",
        &[
            ("pthread_create", "GLIBC_2.2.5"),
            ("pthread_detach", "GLIBC_2.2.5"),
            ("pthread_join", "GLIBC_2.2.5"),
            ("pthread_key_create", "GLIBC_2.2.5"),
            ("pthread_key_delete", "GLIBC_2.2.5"),
            ("pthread_setspecific", "GLIBC_2.2.5"),
            ("pthread_attr_setstacksize", "GLIBC_2.2.5"),
            ("pthread_setname_np", "GLIBC_2.12"),
            // Weak in the standard library, which makes the system call where there is none: as it was in 2.28.
            ("gettid", "GLIBC_2.2.5"),
            // What `stat64` and the like are made of (`older_glibc.rs`).
            ("__xstat64", "GLIBC_2.2.5"),
            ("__lxstat64", "GLIBC_2.2.5"),
            ("__fxstat64", "GLIBC_2.2.5"),
        ],
    ),
    ("libdl.so", "libdl.so.2", &[("dlsym", "GLIBC_2.2.5")]),
    ("libm-2.28.so", "libm.so.6", &[("exp", "GLIBC_2.2.5"), ("log", "GLIBC_2.2.5"), ("pow", "GLIBC_2.2.5")]),
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(links_older_glibc)");
    let target = env::var("TARGET").unwrap_or_default();
    if target != "x86_64-unknown-linux-gnu" || env::var("HOST").as_deref() != Ok("x86_64-unknown-linux-gnu") {
        return;
    }
    let Ok(out) = env::var("OUT_DIR") else { return };
    let folder = Path::new(&out).join("glibc-2.28");
    match make_libraries(&folder) {
        Ok(()) => {
            println!("cargo:rustc-link-search=native={}", folder.display());
            println!("cargo:rustc-cfg=links_older_glibc");
        }
        Err(error) => {
            println!("cargo:warning=the module will need this machine's C library or a newer one: {error}");
        }
    }
}

fn make_libraries(folder: &Path) -> io::Result<()> {
    // One that is left from a build which failed half-way would be found all the same.
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    for (file, name, functions) in LIBRARIES {
        let (mut code, mut versions) = (String::new(), String::new());
        for (function, version) in functions {
            let _ = writeln!(code, "void {function}(void) {{}}");
            if !versions.contains(&format!("{version} ")) {
                let all: Vec<_> =
                    functions.iter().filter(|(_, each)| each == version).map(|(name, _)| *name).collect();
                let _ = writeln!(versions, "{version} {{ global: {}; }};", all.join("; "));
            }
        }
        let (source, script) = (folder.join("functions.c"), folder.join("versions.map"));
        fs::write(&source, code)?;
        fs::write(&script, versions)?;
        let done = Command::new("cc")
            .args(["-shared", "-nostdlib", "-fno-builtin", "-w", "-o"])
            .arg(folder.join(file))
            .arg(&source)
            .arg(format!("-Wl,-soname,{name},--version-script,{}", script.display()))
            .output()?;
        if !done.status.success() {
            let _ = fs::remove_dir_all(folder);
            return Err(io::Error::other(format!("cc: {}", String::from_utf8_lossy(&done.stderr))));
        }
    }
    // The other functions of the library are the system's.
    let script = format!("INPUT({} -l:libm.so.6)\n", folder.join("libm-2.28.so").display());
    fs::write(folder.join("libm.so"), script)
}
