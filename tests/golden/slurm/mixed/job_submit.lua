-- job_submit.lua of hybridsched: what a job needs in the partitions of offline work, so that it starts when a lane
-- opens, gives its GPU back when online needs it, and goes on where it was.
--
-- Runs inside slurmctld under its locks: it looks at the job's own fields only, does no I/O and keeps no state.
-- Jobs of every other partition pass untouched.
--
-- What can safely be chosen is chosen (requeue; the GPU type where the site has one; a time limit where the site
-- gives a default). What cannot is refused, once, with every line to add. Slurm shows this script neither the
-- --signal of the command line nor that of sbatch's own options: it is read from the #SBATCH lines of the batch
-- script and from SBATCH_SIGNAL.

-- site: begin  (`hybridsched slurm render` writes these values for a site)
local site = {
  offline = { "bulk" },             -- partitions of offline work
  fill = "lanes",                   -- GRES whose count is the number of open lanes
  gpu_types = { "h100", "1g.10gb" }, -- types that --gres=gpu:TYPE:n may name
  signal = "USR2",                  -- told to the batch shell before the GPU is taken
  notice_s = 90,                    -- seconds of notice in the line that is proposed
  min_notice_s = 30,                -- shortest notice that is accepted
  default_minutes = 240,            -- time limit of a job that names none; 0: refuse it
  append_is_default = true,         -- slurm.conf has JobFileAppend=1
}
-- site: end

local MAX_LINES = 400 -- of a batch script that are looked at, for slurmctld waits meanwhile

local NO_VAL16 = 65534
local NO_VAL = 4294967294

local SIGNAL_NUMBERS = { HUP = 1, INT = 2, QUIT = 3, USR1 = 10, USR2 = 12, TERM = 15, CONT = 18 }

-- A field that this release of Slurm does not have reads as nil.
local function field(record, name)
  local ok, value = pcall(function() return record[name] end)
  if not ok or value == "" then return nil end
  return value
end

local function variable(job, name)
  local environment = field(job, "environment")
  if environment == nil then return nil end
  return field(environment, name)
end

-- The options of the #SBATCH lines, as sbatch reads them: up to the first line that is a command.
local function script_options(script)
  local found, lines = {}, 0
  for line in (script .. "\n"):gmatch("(.-)\r?\n") do
    lines = lines + 1
    if lines > MAX_LINES or (line:match("%S") and not line:match("^%s*#")) then break end
    local words = line:match("^#SBATCH%s+(.*)$")
    if words then
      words = words:gsub("%s#.*$", "") .. " "
      for name, value in words:gmatch("%-%-([%w%-]+)[=%s]%s*[\"']?([^%s\"']*)") do
        found[name] = value
      end
    end
  end
  return found
end

-- "B:USR2@60" -> "USR2", 60, true. Slurm's own notice is 60 s when none is given.
local function parse_signal(text)
  local flags, rest = text:match("^([BbRr]+):(.*)$")
  rest = rest or text
  local name, notice = rest:match("^([%w]+)@(%d+)$")
  name = (name or rest):upper():gsub("^SIG", "")
  return name, tonumber(notice or 60), flags ~= nil and flags:upper():find("B", 1, true) ~= nil
end

local function same_signal(name)
  return name == site.signal or tonumber(name) == SIGNAL_NUMBERS[site.signal]
end

-- Which of the job's partitions is one of offline work, or nil. A job that names none goes to the default one.
local function offline_partition(names, part_list)
  if names == nil then
    for name, part in pairs(part_list or {}) do
      if field(part, "flag_default") == 1 then names = name end
    end
  end
  for name in tostring(names or ""):gmatch("[^,%s]+") do
    for _, ours in ipairs(site.offline) do
      if name == ours then return name end
    end
  end
  return nil
end

-- Every GRES of the job: "gres:gpu:1", "gres/gpu:a100:1,gres/hsfill:1" by release and option.
local function each_gres(job, visit)
  for _, name in ipairs({ "tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task" }) do
    for part in tostring(field(job, name) or ""):gmatch("[^,]+") do
      visit(name, (part:gsub("^gres[:/]", "")))
    end
  end
end

-- "gpu" and "gpu:2" name no type, "gpu:a100" and "gpu:1g.10gb:2" do.
local function gpu_type(part)
  local word = part:match("^gpu:([^:=]+)")
  if word and not word:match("^%d+$") then return word end
  return nil
end

local function add_type(value)
  local parts = {}
  for part in value:gmatch("[^,]+") do
    local prefix, rest = part:match("^(gres[:/])(.*)$")
    rest = rest or part
    if (rest == "gpu" or rest:match("^gpu[:=]")) and not gpu_type(rest) then
      rest = "gpu:" .. site.gpu_types[1] .. rest:sub(4)
    end
    parts[#parts + 1] = (prefix or "") .. rest
  end
  return table.concat(parts, ",")
end

local function check_gres(job, missing)
  local fill, typed, untyped = false, false, {}
  each_gres(job, function(name, part)
    local word = part:match("^[^:=]+")
    if word == site.fill then
      fill = true
    elseif word == "gpu" and gpu_type(part) then
      typed = true
    elseif word == "gpu" then
      untyped[#untyped + 1] = name
    end
  end)
  if #untyped > 0 and #site.gpu_types == 1 then
    -- One type: an untyped request can mean nothing else.
    for _, name in ipairs(untyped) do job[name] = add_type(tostring(field(job, name))) end
  elseif #untyped > 0 then
    missing[#missing + 1] = "#SBATCH --gres=gpu:" .. site.gpu_types[1] .. ":1"
      .. "    # with the type (" .. table.concat(site.gpu_types, ", ") .. "): gpu:1 may be any of them"
  elseif not fill and not typed then
    missing[#missing + 1] = "#SBATCH --gres=" .. site.fill .. ":1"
      .. "    # one open lane; for a GPU of your own instead: --gres=gpu:" .. site.gpu_types[1] .. ":1"
  end
end

local function check_requeue(job, missing)
  local requeue = field(job, "requeue")
  if requeue == nil or requeue == NO_VAL16 then
    job.requeue = 1
  elseif requeue == 0 then
    missing[#missing + 1] = "#SBATCH --requeue    # instead of --no-requeue: the GPU is taken back when online needs it"
  end
end

local function check_signal(job, options, missing)
  local given = variable(job, "SBATCH_SIGNAL") or options.signal
  local line = "#SBATCH --signal=B:" .. site.signal .. "@" .. site.notice_s
  if given == nil then
    missing[#missing + 1] = line .. "    # notice before the GPU is taken (in the script: the command line's is not seen)"
    return
  end
  local name, notice, batch = parse_signal(given)
  if not same_signal(name) then
    missing[#missing + 1] = line .. "    # instead of " .. given .. ": the worker acts on " .. site.signal
  elseif not batch then
    missing[#missing + 1] = line .. "    # instead of " .. given .. ": without B: the batch shell never gets it"
  elseif notice < site.min_notice_s then
    missing[#missing + 1] = line .. "    # instead of " .. given .. ": at least " .. site.min_notice_s .. " s"
  end
end

local function check_append(job, options, missing)
  local mode = variable(job, "SLURM_OPEN_MODE") or variable(job, "SBATCH_OPEN_MODE") or options["open-mode"]
  local first = mode and mode:sub(1, 1):lower()
  if first == "a" or (first == nil and site.append_is_default) then return end
  missing[#missing + 1] = "#SBATCH --open-mode=append    # a second run would otherwise empty the job's log"
end

local function check_time(job, part, missing)
  local limit = field(job, "time_limit")
  if limit ~= nil and limit ~= NO_VAL then return end
  local default = part and field(part, "default_time")
  if default ~= nil and default ~= NO_VAL then return end
  if site.default_minutes > 0 then
    job.time_limit = site.default_minutes
    return
  end
  missing[#missing + 1] = "#SBATCH --time=04:00:00    # a time limit: short jobs fill short gaps, a batch goes on in its next run"
end

function slurm_job_submit(job, part_list, submit_uid)
  local partition = offline_partition(field(job, "partition"), part_list)
  if partition == nil then return slurm.SUCCESS end
  local script = field(job, "script")
  if script == nil then
    slurm.log_user("hybridsched: partition " .. partition .. " takes batch jobs only, for srun and salloc cannot be "
      .. "requeued when online needs the GPU. Use sbatch, or another partition.")
    return slurm.ERROR
  end
  local options, missing = script_options(tostring(script)), {}
  check_gres(job, missing)
  check_requeue(job, missing)
  check_signal(job, options, missing)
  check_append(job, options, missing)
  check_time(job, part_list and part_list[partition], missing)
  if #missing == 0 then return slurm.SUCCESS end
  slurm.log_user("hybridsched: partition " .. partition .. " needs " .. (#missing == 1 and "one more line" or
    #missing .. " more lines") .. " in the batch script, below its first line:\n" .. table.concat(missing, "\n"))
  return slurm.ERROR
end

-- A job that was checked stays as it was checked; root and Slurm's own user (0 here, or whoever runs slurmctld and
-- so may do anything) change what they like.
function slurm_job_modify(job, record, part_list, modify_uid)
  if modify_uid == 0 then return slurm.SUCCESS end
  local now = offline_partition(field(record, "partition") or "", part_list)
  local wanted = field(job, "partition")
  local moves = wanted ~= nil and offline_partition(wanted, part_list) ~= nil and now == nil
  if moves then
    slurm.log_error("hybridsched: job moved to partition %s by uid %d: refused, to be submitted anew", wanted, modify_uid)
    return slurm.ERROR
  end
  if now ~= nil and field(job, "requeue") == 0 then
    slurm.log_error("hybridsched: --no-requeue for a job of partition %s by uid %d: refused", now, modify_uid)
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

slurm.log_info("hybridsched: job_submit.lua loaded for partition %s", table.concat(site.offline, ","))
return slurm.SUCCESS
