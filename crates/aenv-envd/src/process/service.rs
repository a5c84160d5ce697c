//! `process.Process`: the calls.

use std::sync::Arc;

use aenv_envd_api::proto::process::{
    __buffa::oneof::{process_input, process_selector, stream_input_request},
    CloseStdinRequest, CloseStdinResponse, ConnectRequest, ConnectResponse, ListRequest, ListResponse, PTY,
    Process as Calls, ProcessInfo, ProcessInput, ProcessSelector, SendInputRequest, SendInputResponse,
    SendSignalRequest, SendSignalResponse, Signal as RequestedSignal, StartRequest, StartResponse,
    StreamInputRequest, StreamInputResponse, UpdateRequest, UpdateResponse,
};
use connectrpc::{
    ConnectError, Encodable, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult,
    ServiceStream,
};
use futures::StreamExt as _;
use nix::{pty::Winsize, sys::signal::Signal};

use super::{
    ProcessError,
    events::stream_of,
    input::window,
    registry::{Process, Selector},
    spawn::{self, Plan, Started, Streams},
    supervise::supervise,
};
use crate::{access, guest::Guest, pace::Pace, paths, users::User};

/// What `PATH` is where nothing sets it.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Serves `process.Process`.
pub struct Service {
    guest: Arc<Guest>,
}

impl Service {
    /// Serves the processes of a guest.
    pub fn new(guest: Arc<Guest>) -> Self {
        Self { guest }
    }

    fn user(&self, context: &RequestContext) -> Result<User, ProcessError> {
        let name = access::basic_user(context.headers()).map_err(ProcessError::Credentials)?;
        Ok(self.guest.user(name.as_deref())?)
    }

    fn plan(&self, user: User, request: &StartRequest) -> Result<Plan, ProcessError> {
        let config = request
            .process
            .as_option()
            .filter(|config| !config.cmd.is_empty())
            .ok_or_else(|| ProcessError::Invalid("no command: process.cmd is empty".to_owned()))?;
        let settings = self.guest.settings();
        let cwd = paths::resolve(
            config.cwd.as_deref().unwrap_or_default(),
            &user,
            settings.default_workdir.as_deref(),
        )?;
        if !cwd.is_dir() {
            return Err(ProcessError::NoCwd(cwd.display().to_string()));
        }
        let home = user.home.display().to_string();
        let own = [("PATH", DEFAULT_PATH), ("HOME", &home), ("USER", &user.name), ("LOGNAME", &user.name)];
        let mut env: std::collections::BTreeMap<String, String> =
            own.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        env.extend(settings.env.clone());
        env.extend(config.envs.clone());
        // The kernel could not tell them apart from others.
        if let Some(name) = env.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
            return Err(ProcessError::Invalid(format!("{name:?} cannot name an environment variable")));
        }
        let streams = match (request.pty.as_option(), request.stdin) {
            (Some(pty), _) => Streams::Terminal(size_of(pty).unwrap_or_else(|| window(80, 24))),
            (None, Some(false)) => Streams::Output,
            (None, _) => Streams::InputAndOutput,
        };
        Ok(Plan { cmd: config.cmd.clone(), args: config.args.clone(), env, cwd, user, streams })
    }

    fn launch(
        &self,
        plan: Plan,
        request: StartRequest,
        pace: Pace,
    ) -> Result<ServiceStream<StartResponse>, ProcessError> {
        let cmd = plan.cmd.clone();
        let started = spawn::spawn(plan).map_err(|source| ProcessError::Start { cmd, source })?;
        let Started { child, pidfd, input, sources } = started;
        let config = request.process.into_option().unwrap_or_default();
        let pidfd = Arc::new(pidfd);
        let process = Arc::new(Process::new(child.id(), request.tag, config, input, Arc::clone(&pidfd)));
        let events = process.subscribe();
        let pid = process.pid;
        self.guest.processes.insert(Arc::clone(&process));
        tokio::spawn(supervise(Arc::clone(&self.guest), process, child, pidfd, sources, pace.deadline));
        let stream = stream_of(pid, events, pace)
            .map(|event| event.map(|event| StartResponse { event: event.into(), ..Default::default() }));
        Ok(Box::pin(stream))
    }

    fn live(&self, selector: Option<ProcessSelector>) -> Result<Arc<Process>, ProcessError> {
        self.guest.processes.find_live(&selected(selector)?)
    }
}

fn selected(selector: Option<ProcessSelector>) -> Result<Selector, ProcessError> {
    match selector.and_then(|selector| selector.selector) {
        Some(process_selector::Selector::Pid(pid)) => Ok(Selector::Pid(pid)),
        Some(process_selector::Selector::Tag(tag)) => Ok(Selector::Tag(tag)),
        None => Err(ProcessError::Invalid("no process is named: give its pid or tag".to_owned())),
    }
}

fn size_of(pty: &PTY) -> Option<Winsize> {
    pty.size.as_option().map(|size| window(size.cols, size.rows))
}

async fn write(process: &Process, input: Option<ProcessInput>) -> Result<(), ProcessError> {
    match input.and_then(|input| input.input) {
        Some(process_input::Input::Stdin(bytes)) => process.input.write_stdin(&bytes).await,
        Some(process_input::Input::Pty(bytes)) => process.input.write_terminal(&bytes).await,
        None => Err(ProcessError::Invalid("no input: give stdin or pty".to_owned())),
    }
}

impl Calls for Service {
    async fn list<'a>(
        &'a self,
        _context: RequestContext,
        _request: ServiceRequest<'_, ListRequest>,
    ) -> ServiceResult<impl Encodable<ListResponse> + Send + use<'a>> {
        let describe = |process: Arc<Process>| ProcessInfo {
            config: process.config.clone().into(),
            pid: process.pid,
            tag: process.tag.clone(),
            ..Default::default()
        };
        let processes = self.guest.processes.live().into_iter().map(describe).collect();
        Response::ok(ListResponse { processes, ..Default::default() })
    }

    async fn start(
        &self,
        context: RequestContext,
        request: ServiceRequest<'_, StartRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<StartResponse> + Send + use<>>> {
        let request = request.to_owned_message();
        let user = self.user(&context)?;
        let plan = self.plan(user, &request)?;
        Response::ok(self.launch(plan, request, Pace::of(&context))?)
    }

    async fn connect(
        &self,
        context: RequestContext,
        request: ServiceRequest<'_, ConnectRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<ConnectResponse> + Send + use<>>> {
        let selector = selected(request.to_owned_message().process.into_option())?;
        let process = self.guest.processes.find_known(&selector)?;
        let stream = stream_of(process.pid, process.subscribe(), Pace::of(&context))
            .map(|event| event.map(|event| ConnectResponse { event: event.into(), ..Default::default() }));
        Ok(Response::stream(stream))
    }

    async fn update<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, UpdateRequest>,
    ) -> ServiceResult<impl Encodable<UpdateResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.live(request.process.into_option())?;
        if let Some(size) = request.pty.as_option().and_then(size_of) {
            process.input.resize(size)?;
        }
        Response::ok(UpdateResponse::default())
    }

    async fn stream_input<'a>(
        &'a self,
        _context: RequestContext,
        mut requests: InboundStream<StreamInputRequest>,
    ) -> ServiceResult<impl Encodable<StreamInputResponse> + Send + use<'a>> {
        let mut process: Option<Arc<Process>> = None;
        while let Some(request) = requests.next().await {
            match (request?.to_owned_message().event, &process) {
                (Some(stream_input_request::Event::Start(start)), None) => {
                    process = Some(self.live(start.process.into_option())?);
                }
                (Some(stream_input_request::Event::Start(_)), Some(_)) => {
                    return Err(ConnectError::invalid_argument(
                        "a stream of input has one start, its first message",
                    ));
                }
                (Some(stream_input_request::Event::Data(data)), Some(process)) => {
                    write(process, data.input.into_option()).await?;
                }
                (Some(stream_input_request::Event::Data(_)), None) => {
                    return Err(ConnectError::invalid_argument(
                        "a stream of input begins with a start message",
                    ));
                }
                (Some(stream_input_request::Event::Keepalive(_)) | None, _) => {}
            }
        }
        Response::ok(StreamInputResponse::default())
    }

    async fn send_input<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, SendInputRequest>,
    ) -> ServiceResult<impl Encodable<SendInputResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.live(request.process.into_option())?;
        write(&process, request.input.into_option()).await?;
        Response::ok(SendInputResponse::default())
    }

    async fn send_signal<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, SendSignalRequest>,
    ) -> ServiceResult<impl Encodable<SendSignalResponse> + Send + use<'a>> {
        let request = request.to_owned_message();
        let process = self.live(request.process.into_option())?;
        let signal = match request.signal.to_i32() {
            number if number == RequestedSignal::SIGNAL_SIGKILL as i32 => Signal::SIGKILL,
            number if number == RequestedSignal::SIGNAL_SIGTERM as i32 => Signal::SIGTERM,
            number => return Err(ProcessError::Signal(number).into()),
        };
        process.signal(signal)?;
        process.cut_output();
        Response::ok(SendSignalResponse::default())
    }

    async fn close_stdin<'a>(
        &'a self,
        _context: RequestContext,
        request: ServiceRequest<'_, CloseStdinRequest>,
    ) -> ServiceResult<impl Encodable<CloseStdinResponse> + Send + use<'a>> {
        let process = self.live(request.to_owned_message().process.into_option())?;
        process.input.close().await?;
        Response::ok(CloseStdinResponse::default())
    }
}
