-- Functions for --@include; no script by itself. Reads neither KEYS nor ARGV: keys come from its caller.
-- Returns: see each function.
--
-- The live replicas of a model: hash replica -> "expires_ms load inflight cap woken", and behind it, where the
-- policy packs online, " until_ms rank most_inflight most_load": its place in the pack order (pack_publish.lua).
-- woken 1: a wake was published and the replica has not claimed since, so no second one is needed.
local FIELDS = '^(%S+) (%S+) (%S+) (%S+) (%S+)(.*)$'

-- A key of another type is replaced: it is a place of ours, and no claim of the model could succeed while it stands.
local function write_replica(key, name, expires, load, inflight, cap, woken, place)
  local record = string.format('%.0f %.0f %d %d %d', expires, load, inflight, cap, woken) .. (place or '')
  local done = redis.pcall('HSET', key, name, record)
  if type(done) == 'table' and done.err then
    if not string.find(done.err, '^WRONGTYPE') then
      error(done)
    end
    redis.call('DEL', key)
    redis.call('HSET', key, name, record)
  end
end

-- A place as text, with numbers; nil: there is none, or it is not one. `stands`: its lease is not over.
local function place_of(text, now)
  local ends, rank, most, weight = string.match(text, '^ (%S+) (%S+) (%S+) (%S+)$')
  ends, rank, most, weight = tonumber(ends), tonumber(rank), tonumber(most), tonumber(weight)
  if not (ends and rank and most and weight) then
    return nil
  end
  return {text = text, rank = rank, most = most, weight = weight, stands = ends > now}
end

local function below(place, load, inflight)
  return place and place.stands and inflight < place.most and load < place.weight
end

-- Who takes the next request: the live replica with room that is first in the pack order and below its caps, else the
-- one of the least load; of equals the one with fewer requests. `except`: a name
-- to leave out. Records past their time, or that no worker writes, are removed on the way: one with a load that
-- is no number would compare as the best for ever. Returns nil when there is none; second, how many live
-- replicas there are, with room or without; third, how many of them but `except` have room; fourth the one of the
-- least load; fifth the first of the order, nil when none is below its caps; sixth the place of `except`.
local MOST_LIFE_MS = 86400000
local function least_loaded(key, now, except)
  local all = redis.pcall('HGETALL', key)
  if all.err then
    return nil, 0, 0  -- another type: nobody of ours lives there
  end
  local best, first, own
  local live, roomy = 0, 0
  for i = 1, #all, 2 do
    local expires, load, inflight, cap, woken, rest = string.match(all[i + 1], FIELDS)
    expires, load, inflight, cap = tonumber(expires), tonumber(load), tonumber(inflight), tonumber(cap)
    local place = rest and rest ~= '' and place_of(rest, now) or nil
    if not (expires and load and inflight and cap) or not (expires > now and expires <= now + MOST_LIFE_MS)
      or not (load >= 0 and load < math.huge and inflight >= 0) or rest ~= '' and not place then
      redis.call('HDEL', key, all[i])
    else
      live = live + 1
      if all[i] == except then
        own = place
      elseif inflight < cap then
        roomy = roomy + 1
        local it = {name = all[i], expires = expires, load = load, inflight = inflight, cap = cap, woken = woken,
          place = place and place.text, rank = place and place.rank}
        if not best or load < best.load or (load == best.load and inflight < best.inflight) then
          best = it
        end
        if below(place, load, inflight) and not (first and first.rank <= place.rank) then
          first = it
        end
      end
    end
  end
  return first or best, live, roomy, best, first, own
end

local function wake(key, prefix, best)
  if best and best.woken ~= '1' then
    write_replica(key, best.name, best.expires, best.load, best.inflight, best.cap, 1, best.place)
    redis.call('PUBLISH', prefix .. 'wake:' .. best.name, 'wake')
  end
end
