-- job_submit.lua of hybridsched: what a job needs in the partitions of offline work, so that it starts when a lane
-- opens, gives its GPU back when online needs it, and goes on where it was.
--
-- Runs inside slurmctld under its locks: it looks at the job's own fields only, does no I/O and keeps no state.
-- Jobs of every other partition pass untouched, unless they ask for the lanes or places of offline work.
--
-- What can safely be chosen is chosen (requeue; the GPU type where the site has one; a time limit where the site
-- gives a default). What cannot is refused, once, with every line to add. Slurm shows this script neither the
-- --signal of the command line nor that of sbatch's own options: it is read from the #SBATCH lines of the batch
-- script and from SBATCH_SIGNAL.

-- site: begin  (`hybridsched slurm render` writes these values for a site)
local site = {
  offline = { "bulk" },             -- partitions of offline work
  fill = "lanes",                   -- GRES whose count is the number of free open lanes
  place = "hslane",                 -- GRES that each lane of a job takes too, added by itself; "": none
  gpu_types = { "h100", "1g.10gb" }, -- types that --gres=gpu:TYPE:n may name
  signal = "USR2",                  -- told to the batch shell before the GPU is taken
  notice_s = 90,                    -- seconds of notice in the line that is proposed
  min_notice_s = 30,                -- shortest notice that is accepted
  default_minutes = 240,            -- time limit of a job that names none; 0: refuse it
  append_is_default = true,         -- slurm.conf has JobFileAppend=1
}
-- site: end

-- slurmctld waits while a script is looked at, and any user may submit any script: no more of it than this is read,
-- and every scan is linear in what is read.
local MAX_LINES = 400
local MAX_BYTES = 65536

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

-- The words of an #SBATCH line as sbatch takes them (tried on 22.05): quotes belong to no word, and an unquoted #
-- begins a remark, in the middle of a word too.
local function words_of(line, at)
  local words, pieces = {}, nil
  while at <= #line do
    local _, plain = line:find("^[^%s\"'#]+", at)
    local _, space = line:find("^%s+", at)
    if plain then
      pieces = pieces or {}
      pieces[#pieces + 1] = line:sub(at, plain)
      at = plain + 1
    elseif space then
      if pieces then words[#words + 1] = table.concat(pieces) end
      pieces, at = nil, space + 1
    else
      local mark = line:sub(at, at)
      if mark == "#" then break end
      local close = line:find(mark, at + 1, true) or #line + 1
      pieces = pieces or {}
      pieces[#pieces + 1] = line:sub(at + 1, close - 1)
      at = close + 1
    end
  end
  if pieces then words[#words + 1] = table.concat(pieces) end
  return words
end

-- The long options of the #SBATCH lines, up to the first line that is a command.
local function script_options(script)
  local found, at = {}, 1
  local text = script:sub(1, MAX_BYTES)
  for _ = 1, MAX_LINES do
    if at > #text then break end
    local line_end = text:find("\n", at, true) or #text + 1
    local line = text:sub(at, line_end - 1)
    at = line_end + 1
    if line:find("%S") and not line:find("^%s*#") then break end
    if line:find("^#SBATCH%s") then
      local waiting
      for _, word in ipairs(words_of(line, 8)) do
        if waiting then found[waiting] = word end
        waiting = nil
        if word:sub(1, 2) == "--" then
          local equal = word:find("=", 3, true)
          if equal then
            found[word:sub(3, equal - 1)] = word:sub(equal + 1)
          else
            waiting = word:sub(3)
          end
        end
      end
    end
  end
  return found
end

-- What a user wrote, in a message: short, and on one line.
local function quoted(text)
  if #text > 60 then text = text:sub(1, 57) .. "..." end
  return (text:gsub("%c", "?"))
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

-- The first part of a job's GRES that is offline work's own, or nil. Any user's job of another partition that took the
-- places of a node would keep offline work away from it, unseen.
local function offline_gres(job)
  local found
  each_gres(job, function(_, part)
    local word = part:match("^[^:=]+")
    if word ~= nil and (word == site.fill or word == site.place) then found = found or part end
  end)
  return found
end

-- "gpu" and "gpu:2" name no type, "gpu:a100" and "gpu:1g.10gb:2" do.
local function gpu_type(part)
  local word = part:match("^gpu:([^:=]+)")
  if word and not word:match("^[0-9]+[kKmMgGtTpP]?$") then return word end
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

-- Whether a part of ours has a count that is no plain number above 0. With a count of 0, which Slurm also reads in
-- "+0" and "-0", a job is valid, asks for nothing, and starts beside closed gates.
local function wrong_count(part)
  local word = part:match("^[^:=]+")
  if word == nil or not (word == site.fill or word == "gpu" or word == site.place) then return false end
  local rest = part:sub(#word + 1)
  if word == "gpu" and gpu_type(part) then
    local type = gpu_type(part)
    if not type:match("^[A-Za-z0-9][A-Za-z0-9._-]*$") then return true end
    rest = rest:sub(#type + 2)
  end
  if rest == "" then return false end
  local digits = rest:match("^[:=]([0-9]+)[kKmMgGtTpP]?$")
  return digits == nil or digits:find("[1-9]") == nil
end

local function check_gres(job, missing)
  local fill, place, typed, untyped, wrong = false, false, false, {}, nil
  each_gres(job, function(name, part)
    local word = part:match("^[^:=]+")
    if wrong_count(part) then
      wrong = wrong or part
    elseif word == site.fill then
      fill = true
    elseif word == site.place then
      place = true
    elseif word == "gpu" and gpu_type(part) then
      typed = true
    elseif word == "gpu" then
      untyped[#untyped + 1] = name
    end
  end)
  if wrong then
    missing[#missing + 1] = "#SBATCH --gres=" .. site.fill .. ":1"
      .. "    # instead of " .. quoted(wrong) .. ": a count is a plain number above 0; with 0 the job asks for no lane, "
      .. "and would start beside closed gates"
  elseif #untyped > 0 and #site.gpu_types == 1 then
    -- One type: an untyped request can mean nothing else.
    for _, name in ipairs(untyped) do job[name] = add_type(tostring(field(job, name))) end
  elseif #untyped > 0 then
    missing[#missing + 1] = "#SBATCH --gres=gpu:" .. site.gpu_types[1] .. ":1"
      .. "    # with the type (" .. table.concat(site.gpu_types, ", ") .. "): gpu:1 may be any of them"
  elseif place and not fill and typed then
    missing[#missing + 1] = "#SBATCH --gres=gpu:" .. site.gpu_types[1] .. ":1"
      .. "    # without " .. site.place .. ": places are for jobs that wait for a lane"
  elseif not fill and not typed then
    missing[#missing + 1] = "#SBATCH --gres=" .. site.fill .. ":1" .. (site.place ~= "" and "," .. site.place .. ":1" or "")
      .. "    # one open lane of online's engines"
  end
end

-- Each lane that a job asks for takes a place too: places are what Slurm counts down while lanes open and close.
local function add_places(job)
  if site.place == "" then return false end
  local added = false
  for _, name in ipairs({ "tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task" }) do
    local value, want, has = tostring(field(job, name) or ""), nil, false
    for part in value:gmatch("[^,]+") do
      local bare = part:gsub("^gres[:/]", "")
      local word = bare:match("^[^:=]+")
      if word == site.place then has = true end
      if word == site.fill then want = (part:match("^gres[:/]") or "") .. site.place .. bare:sub(#site.fill + 1) end
    end
    if want and not has then
      job[name] = value .. "," .. want
      added = true
    end
  end
  return added
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
    missing[#missing + 1] = line .. "    # instead of " .. quoted(given) .. ": the worker acts on " .. site.signal
  elseif not batch then
    missing[#missing + 1] = line .. "    # instead of " .. quoted(given) .. ": without B: the batch shell never gets it"
  elseif notice < site.min_notice_s then
    missing[#missing + 1] = line .. "    # instead of " .. quoted(given) .. ": at least " .. site.min_notice_s .. " s"
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
  if partition == nil then
    local part = offline_gres(job)
    if part == nil then return slurm.SUCCESS end
    slurm.log_user("hybridsched: " .. quoted(part) .. " is for partition " .. table.concat(site.offline, ", ")
      .. " only. For offline work: --partition=" .. site.offline[1] .. " --gres=" .. site.fill .. ":1"
      .. (site.place ~= "" and "," .. site.place .. ":1" or "") .. "; for any other: --gres without it.")
    return slurm.ERROR
  end
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
  if #missing == 0 then
    if add_places(job) then
      slurm.log_user("hybridsched: " .. site.place .. ", a place on the node, was added to --gres=" .. site.fill
        .. ": write --gres=" .. site.fill .. ":1," .. site.place .. ":1")
    end
    return slurm.SUCCESS
  end
  slurm.log_user("hybridsched: partition " .. partition .. " needs " .. (#missing == 1 and "one more line" or
    #missing .. " more lines") .. " in the batch script, below its first line:\n" .. table.concat(missing, "\n"))
  return slurm.ERROR
end

-- Of a job as a change leaves it: whether it changes what GRES the job asks for, whether it then waits for a lane and
-- takes a place (or needs none), whether it takes a GPU of a type, and a part that has a wrong count.
local function changed_gres(job, record)
  local changes, fill, place, typed, wrong = false, false, site.place == "", false, nil
  for _, name in ipairs({ "tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task" }) do
    -- An empty text takes away what was asked for; nil leaves it. So not by field(), which knows no difference.
    local ok, value = pcall(function() return job[name] end)
    if ok and value ~= nil then changes = true else value = field(record, name) end
    each_gres({ [name] = value }, function(_, part)
      local word = part:match("^[^:=]+")
      if ok and job[name] ~= nil and wrong_count(part) then wrong = wrong or part end
      fill = fill or word == site.fill
      place = place or word == site.place
      typed = typed or gpu_type(part) ~= nil
    end)
  end
  return changes, fill and place, typed and not fill, wrong
end

-- Whether the job waits for lanes now, as far as this release shows it.
local function has_gate(record)
  local fill = false
  each_gres(record, function(_, part) fill = fill or part:match("^[^:=]+") == site.fill end)
  return fill
end

-- A job that was checked stays as it was checked; root changes what it likes.
function slurm_job_modify(job, record, part_list, modify_uid)
  if modify_uid == 0 then return slurm.SUCCESS end
  local now = offline_partition(field(record, "partition") or "", part_list)
  local wanted = field(job, "partition")
  local moves = wanted ~= nil and offline_partition(wanted, part_list) ~= nil and now == nil
  if moves then
    slurm.log_error("hybridsched: job moved to partition %s by uid %d: refused, to be submitted anew", wanted, modify_uid)
    return slurm.ERROR
  end
  -- What the change leaves: another partition with the GRES that the job has or now gets.
  local later = now
  if wanted ~= nil then later = offline_partition(wanted, part_list) end
  if later == nil and (offline_gres(job) or (wanted ~= nil and now ~= nil and offline_gres(record))) then
    slurm.log_error("hybridsched: %s or %s outside the offline partition by uid %d: refused", site.fill, site.place,
      modify_uid)
    return slurm.ERROR
  end
  if now ~= nil and field(job, "requeue") == 0 then
    slurm.log_error("hybridsched: --no-requeue for a job of partition %s by uid %d: refused", now, modify_uid)
    return slurm.ERROR
  end
  if now ~= nil then
    local changes, gated, own_gpu, wrong = changed_gres(job, record)
    if wrong then
      slurm.log_error("hybridsched: %s for a job of partition %s by uid %d: refused", quoted(wrong), now, modify_uid)
      return slurm.ERROR
    end
    if changes and not gated and not (own_gpu and not has_gate(record)) then
      slurm.log_error("hybridsched: GRES without %s%s for a job of partition %s by uid %d: refused, it would start beside "
        .. "closed gates", site.fill, site.place ~= "" and " and " .. site.place or "", now, modify_uid)
      return slurm.ERROR
    end
  end
  return slurm.SUCCESS
end

slurm.log_info("hybridsched: job_submit.lua loaded for partition %s", table.concat(site.offline, ","))
return slurm.SUCCESS
