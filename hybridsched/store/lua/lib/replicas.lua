-- Functions for --@include; no script by itself. Reads neither KEYS nor ARGV: keys come from its caller.
-- Returns: see each function.
--
-- The live replicas of a model: hash replica -> "expires_ms load inflight cap woken".
-- woken 1: a wake was published and the replica has not claimed since, so no second one is needed.
local function write_replica(key, name, expires, load, inflight, cap, woken)
  redis.call('HSET', key, name, string.format('%.0f %.0f %d %d %d', expires, load, inflight, cap, woken))
end

-- The live replica with room and the least load; of equals the one with fewer requests. `except`: a name
-- to leave out. Records past their time are removed on the way. Returns nil when there is none.
local function least_loaded(key, now, except)
  local all = redis.call('HGETALL', key)
  local best
  for i = 1, #all, 2 do
    local expires, load, inflight, cap, woken = string.match(all[i + 1], '^(%S+) (%S+) (%S+) (%S+) (%S+)$')
    expires, load, inflight, cap = tonumber(expires), tonumber(load), tonumber(inflight), tonumber(cap)
    if not (expires and load and inflight and cap) or expires <= now then
      redis.call('HDEL', key, all[i])
    elseif all[i] ~= except and inflight < cap then
      if not best or load < best.load or (load == best.load and inflight < best.inflight) then
        best = {name = all[i], expires = expires, load = load, inflight = inflight, cap = cap, woken = woken}
      end
    end
  end
  return best
end

local function wake(key, prefix, best)
  if best and best.woken ~= '1' then
    write_replica(key, best.name, best.expires, best.load, best.inflight, best.cap, 1)
    redis.call('PUBLISH', prefix .. 'wake:' .. best.name, 'wake')
  end
end
