-- Claim online requests for one replica, and close its lane's gate in the same step.
--
-- The caller is given requests, most urgent class first, while it has room and no live replica with room
-- carries less load by more than the slack. A request that has waited longer than the patience goes to
-- whoever asks: the better replica may be dead or slow. Expired requests are handed over marked, to be
-- answered and never run. If unclaimed requests remain, the least loaded other replica is woken.
--
-- KEYS 1-3 streams of the model, most urgent first   4 its replicas hash   5 gate:LANE   6 gate-epoch:LANE
-- ARGV 1 prefix   2 consumer (REPLICA:incarnation)   3 replica   4 most to take now   5 own load (tokens)
--      6 own requests in flight   7 own cap   8 slack (tokens)   9 patience (ms)   10 life of the caller's
--      record in the replicas hash (ms)   11 weight of a token to decode in the load (a prompt token is 1)
--      12 close: 1 when a lane shares the engine, else 0   13 lane   14 life of a closed gate (ms)
-- Returns {now_ms, gate closed by this call 0/1, epoch, unclaimed left, requests}; a request is
--   {class, entry id, expired 0/1, flat fields}.
-- Whenever a request is granted with close=1 the epoch is raised, so that an opening decided before is
-- refused; when the gate was open it is replaced by a closed one and published on PREFIX..gates.
--@include clock
--@include entries
--@include replicas

local prefix, consumer, replica = ARGV[1], ARGV[2], ARGV[3]
local load, inflight, cap = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local room = math.min(tonumber(ARGV[4]), cap - inflight)
local slack, patience, weight = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[11])
local now = clock_ms()
local other = least_loaded(KEYS[4], now, replica)
local granted, live = {}, 0

local function take(stream, count)
  if redis.call('XLEN', stream) == 0 then
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
  if not other or load <= other.load + slack then
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
      local deadline = tonumber(field(flat, 'deadline_ms') or '')
      if not (deadline and field(flat, 'id') and field(flat, 'reply') and field(flat, 'body')) then
        -- Not written by accept.lua: it names nobody to answer, so it must not block the queue.
        redis.call('XACK', stream, 'workers', entry[1])
        redis.call('XDEL', stream, entry[1])
      elseif deadline <= now then
        granted[#granted + 1] = {class - 1, entry[1], 1, flat}
      else
        granted[#granted + 1] = {class - 1, entry[1], 0, flat}
        local prompt = tonumber(field(flat, 'prompt_tokens') or '') or 0
        local cost = tonumber(field(flat, 'cost') or '') or prompt
        load = load + prompt + weight * (cost - prompt)
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

write_replica(KEYS[4], replica, now + tonumber(ARGV[10]), load, inflight, cap, 0)

local closed, epoch = 0, 0
if live > 0 and ARGV[12] == '1' then
  epoch = redis.call('INCR', KEYS[6])
  local standing = redis.call('GET', KEYS[5])
  local known, gate = pcall(cjson.decode, standing or '')
  if standing and not (known and type(gate) == 'table' and gate.state == 'closed') then
    if not known or type(gate) ~= 'table' then
      gate = {}
    end
    local json = cjson.encode({
      lane = ARGV[13], state = 'closed', reason = 'online_arrived', epoch = epoch, by = replica, at_ms = now,
      budget = {max_inflight = 0, chunk_tokens = 0, slice_tokens = 0},
      grace_ms = tonumber(gate.grace_ms) or 0, policy_version = tonumber(gate.policy_version) or 0,
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
return {string.format('%.3f', now), closed, epoch, left, granted}
