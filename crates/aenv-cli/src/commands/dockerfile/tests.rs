use super::*;

fn file(text: &str) -> Dockerfile {
    parse(text, &BTreeMap::new()).unwrap()
}

fn steps(text: &str) -> Vec<Step> {
    file(text).stages.remove(0).steps
}

fn env(key: &str, value: &str) -> Step {
    Step::Env(vec![(key.into(), value.into())])
}

fn copy(origin: Origin, source: &str, destination: &str) -> Step {
    let (source, destination) = (source.to_owned(), destination.to_owned());
    Step::Copy { origin, source, destination, owner: String::new(), mode: String::new() }
}

#[test]
fn an_ordinary_file() {
    let text = "# syntax\nARG V=12\nFROM debian:${V} AS x\nENV A=1 B=\"two words\"\nENV C three words\n\
                RUN apt-get update \\\n  # why\n  && true\nWORKDIR /app\nCOPY --chown=user a.txt b-$A.txt dir\n\
                USER user:group\nCMD [\"x\"]\n";
    let stage = file(text).stages.remove(0);
    assert_eq!(stage.from, From::Image("debian:12".to_owned()));
    let copy = |source: &str| Step::Copy {
        origin: Origin::Context,
        source: source.to_owned(),
        destination: "dir/".to_owned(),
        owner: "user".to_owned(),
        mode: String::new(),
    };
    let expected = [
        Step::Env(vec![("A".into(), "1".into()), ("B".into(), "two words".into())]),
        env("C", "three words"),
        Step::Run("apt-get update   && true".into()),
        Step::Workdir("/app".into()),
        copy("a.txt"),
        copy("b-1.txt"),
        Step::User("user".into()),
    ];
    assert_eq!(stage.steps, expected);
}

#[test]
fn run_in_all_its_forms() {
    let run = |text: &str| steps(&format!("FROM x\n{text}"));
    assert_eq!(run("RUN [\"echo\", \"it's\"]"), [Step::Run(r"'echo' 'it'\''s'".into())]);
    assert_eq!(run("RUN <<EOF\necho a\necho b\nEOF\n"), [Step::Run("echo a\necho b".into())]);
    assert_eq!(run("RUN --mount=type=cache,target=/x make"), [Step::Run("make".into())]);
    let cat = "cat <<EOF > /f\nhi\nEOF".to_owned();
    assert_eq!(run("RUN cat <<EOF > /f\nhi\nEOF\n"), [Step::Run(cat)]);
    assert_eq!(run("RUN echo $((1<<2))"), [Step::Run("echo $((1<<2))".into())]);
    let Step::Run(program) = &run("RUN <<EOF\n#!/usr/bin/python3\nprint(1)\nEOF")[0] else { panic!() };
    assert!(program.contains("<<'EOF'\n#!/usr/bin/python3\nprint(1)\nEOF\n"), "{program}");
    assert_eq!(
        run("SHELL [\"/bin/bash\", \"-o\", \"pipefail\", \"-c\"]\nRUN a | b"),
        [Step::Run("'/bin/bash' '-o' 'pipefail' '-c' 'a | b'".into())]
    );
}

#[test]
fn stages_refer_to_earlier_ones_by_name_and_number() {
    let text = "FROM a AS build\nRUN make\nFROM b AS unused\nFROM build AS test\nFROM template:t\n\
                COPY --from=Build /out /bin/\nCOPY --from=1 /x /y\nCOPY --from=busybox:1 /bin/sh /sh\n";
    let file = file(text);
    let names: Vec<_> = file.stages.iter().map(|stage| stage.name.as_deref()).collect();
    assert_eq!(names, [Some("build"), Some("unused"), Some("test"), None]);
    assert_eq!(file.stages[2].from, From::Stage(0));
    let last = &file.stages[3];
    assert_eq!(last.from, From::Template("t".to_owned()));
    let expected = [
        copy(Origin::Stage(0), "/out", "/bin/"),
        copy(Origin::Stage(1), "/x", "/y"),
        copy(Origin::Image("busybox:1".to_owned()), "/bin/sh", "/sh"),
    ];
    assert_eq!(last.steps, expected);
    assert_eq!(file.needed(3), [0, 1, 3]);
    assert_eq!(file.needed(2), [0, 2]);
    assert_eq!(file.target(None).unwrap(), 3);
    assert_eq!(file.target(Some("test")).unwrap(), 2);
    assert!(file.target(Some("nobody")).is_err());
}

#[test]
fn arguments_have_a_scope_and_given_ones_win() {
    let given = BTreeMap::from([("V".to_owned(), "13".to_owned())]);
    let text = "ARG V=12\nARG W=w\nFROM debian:$V\nRUN a\nARG V\nARG TARGETARCH\nARG none\nFROM x\nARG W=own\nCOPY $W-$V .\n";
    let file = parse(text, &given).unwrap();
    assert_eq!(file.stages[0].from, From::Image("debian:13".to_owned()));
    assert_eq!(file.stages[0].steps, [Step::Run("a".into()), env("V", "13"), env("TARGETARCH", "amd64")]);
    // V is not declared in the second stage: it stays for the server to replace.
    assert_eq!(file.stages[1].steps, [env("W", "own"), copy(Origin::Context, "own-$V", ".")]);
}

#[test]
fn heredocs_become_files() {
    let text = "FROM x\nENV A=1\nCOPY <<a.txt <<'b' /dir\n$A\na.txt\n$A\nb\n";
    let text_of = |text: &str| Origin::Text(text.to_owned());
    assert_eq!(
        steps(text)[1..],
        [copy(text_of("1\n"), "a.txt", "/dir/"), copy(text_of("$A\n"), "b", "/dir/")]
    );
}

#[test]
fn what_is_not_supported_is_said() {
    for bad in [
        "RUN x",
        "",
        "FROM scratch",
        "FROM a b",
        "FROM a\nCOPY x",
        "FROM a\nCOPY --parents x y",
        "FROM a\nADD --from=b x y",
        "FROM a\nADD https://x/y z",
        "FROM a\nADD x.tar.gz /",
        "FROM a\nONBUILD RUN x",
        "FROM a\nSHELL bash",
        "FROM a\nNONSENSE",
        "FROM a\nRUN",
        "FROM a\nARG",
        "FROM a\nRUN <<EOF\nx",
    ] {
        let error = parse(bad, &BTreeMap::new()).expect_err(bad).to_string();
        assert!(error.starts_with("Dockerfile line") || error.contains("no FROM"), "{bad:?}: {error}");
    }
}
