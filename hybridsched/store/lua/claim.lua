-- Claim online requests for one replica, and close its lane's gate in the same step.
--
-- The caller is given requests, most urgent class first, while it has room and no live replica with room
-- carries less load by more than the slack. A request that has waited longer than the patience goes to
-- whoever asks: the better replica may be dead or slow. The slack, which is for loads that are out of date, holds
-- for the first request and for an even share of what waits: what this call has granted counts, so that a burst
-- is spread, and one of more requests than replicas needs no wake for each.
-- Where a pack order is in force, the lowest rank below its caps goes before all others; load decides when none is.
-- Expired requests are handed over marked, to be answered and never run, and so are entries that accept.lua
-- would not write, to be rejected. If unclaimed requests remain, the other replica whose turn it is is woken.
--
-- KEYS 1-3 streams of the model, most urgent first   4 its replicas hash   5 gate:LANE   6 gate-epoch:LANE
-- ARGV 1 prefix   2 consumer (REPLICA:incarnation)   3 replica   4 most to take now   5 own load (tokens)
--      6 own requests in flight   7 own cap   8 slack (tokens)   9 patience (ms)   10 life of the caller's
--      record in the replicas hash (ms)   11 weight of a token to decode in the load (a prompt token is 1)
--      12 close: 1 when a lane shares the engine, else 0   13 lane   14 life of a closed gate (ms)
-- Returns {now_ms, gate closed by this call 0/1, epoch, unclaimed left, requests}; a request is
--   {class, entry id, 0 to run | 1 expired | 2 to reject, flat fields}. Behind them, where there are any, the
--   streams whose key is of another type; the other classes are claimed all the same.
-- Whenever a request is granted with close=1 the epoch is raised, so that an opening decided before is
-- refused; when the gate was open it is replaced by a closed one and published on PREFIX..gates, unless its budget
-- is one beside online and the load keeps within its `beside_tokens`. What stands in
-- the gate's keys may be anything: requests are claimed by then, so nothing here may fail.
--@include clock
--@include entries
--@include replicas
--@include answer
--@include unreadable

local prefix, consumer, replica = ARGV[1], ARGV[2], ARGV[3]
local load, inflight, cap = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local room = math.min(tonumber(ARGV[4]), cap - inflight)
local slack, patience, weight = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[11])
local now = clock_ms()
local other, _, others, least, first, own = least_loaded(KEYS[4], now, replica)
local granted, live, odd = {}, 0, {}
local waiting = other and unclaimed(KEYS[1]) + unclaimed(KEYS[2]) + unclaimed(KEYS[3]) or 0
local share = math.max(1, math.ceil(waiting / (others + 1)))

local function take(stream, count)
  local length = length_of(stream)
  if not length then
    odd[#odd + 1] = stream
  end
  if not length or length == 0 then
    return {}
  end
  local got = redis.pcall('XREADGROUP', 'GROUP', 'workers', consumer, 'COUNT', count, 'STREAMS', stream, '>')
  if got and got.err then
    make_group(stream)
    got = redis.call('XREADGROUP', 'GROUP', 'workers', consumer, 'COUNT', count, 'STREAMS', stream, '>')
  end
  return got and got[1] and got[1][2] or {}
end

local function may_take(stream)
  if not other then
    return true
  end
  local fits = below(own, load, inflight)
  if first then
    if fits and own.rank < first.rank then
      return true
    end
  elseif fits or live < share and load <= least.load + slack then
    return true
  elseif load < least.load or load == least.load and inflight <= least.inflight then
    return true
  end
  local oldest = head(stream)
  return oldest and tonumber(string.match(oldest[1], '^%d+')) + patience <= now
end

local drained = 0
for class = 1, 3 do
  local stream = KEYS[class]
  while room > 0 and may_take(stream) do
    local entries = take(stream, other and 1 or room)
    for _, entry in ipairs(entries) do
      local flat = entry[2]
      local fields = fields_of(flat)
      if (fields.reply or '') == '' then
        -- It names nobody to answer, so it must not block the queue.
        redis.call('XACK', stream, GROUP, entry[1])
        redis.call('XDEL', stream, entry[1])
      elseif unreadable(fields) then
        granted[#granted + 1] = {class - 1, entry[1], 2, flat}
      elseif tonumber(fields.deadline_ms) <= now then
        granted[#granted + 1] = {class - 1, entry[1], 1, flat}
      else
        granted[#granted + 1] = {class - 1, entry[1], 0, flat}
        local prompt = tonumber(fields.prompt_tokens)
        load = load + prompt + weight * math.max(0, tonumber(fields.cost) - prompt)
        inflight = inflight + 1
        room = room - 1
        live = live + 1
      end
    end
    if #entries == 0 then
      drained = drained + 1
      break
    end
  end
end

write_replica(KEYS[4], replica, now + tonumber(ARGV[10]), load, inflight, cap, 0, own and own.text)

-- cjson cannot write what is not finite.
local function plain(value)
  local n = tonumber(value)
  return n and n >= 0 and n <= 1e12 and n or 0
end

local closed, epoch = 0, 0
if live > 0 and ARGV[12] == '1' then
  epoch = redis.pcall('INCR', KEYS[6])
  if type(epoch) == 'table' then
    -- No number, or at its end: begin above any count of claims, so that no older opening holds.
    epoch = math.floor(now)
    redis.call('SET', KEYS[6], string.format('%.0f', epoch))
  end
  local standing = redis.pcall('GET', KEYS[5])
  if type(standing) == 'table' then
    standing = ''
  end
  local known, gate = pcall(cjson.decode, standing or '')
  local budget = known and type(gate) == 'table' and gate.state == 'open' and gate.budget
  local beside = type(budget) == 'table' and tonumber(budget.beside_tokens) or 0
  if standing and not (beside > 0 and load <= beside)
    and not (known and type(gate) == 'table' and gate.state == 'closed') then
    if not known or type(gate) ~= 'table' then
      gate = {}
    end
    local json = cjson.encode({
      lane = ARGV[13], state = 'closed', reason = 'online_arrived', epoch = epoch, by = replica, at_ms = now,
      since_ms = now,
      budget = {max_inflight = 0, chunk_tokens = 0, slice_tokens = 0},
      grace_ms = plain(gate.grace_ms), policy_version = plain(gate.policy_version),
    })
    redis.call('SET', KEYS[5], json, 'PX', ARGV[14])
    redis.call('PUBLISH', prefix .. 'gates', json)
    closed = 1
  end
end

local left = drained == 3 and 0 or unclaimed(KEYS[1]) + unclaimed(KEYS[2]) + unclaimed(KEYS[3])
if left > 0 then
  wake(KEYS[4], prefix, other)
end
return {string.format('%.3f', now), closed, epoch, left, granted, #odd > 0 and odd or nil}
