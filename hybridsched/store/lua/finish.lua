-- Answer requests for good. Fenced: only whoever still holds a request may end it. Several cost one call.
--
-- One that expired while a repeat of its id waits for longer goes back to the end of its queue instead, unless part
-- of its answer has been sent; those whose time is over are told. Its next claim comes with a worker's next look.
--
-- KEYS, for each request: its hash, its stream, its reply streams.
-- ARGV 1 consumer   2 how long the result is kept, ms   3 life of the reply stream after this, ms   4 its MAXLEN
--   then six for each request: entry id, request id, attempt, number of its reply streams, 1 when the end says that
--   it expired (else 0), end (JSON).
-- Returns, for each request: 1 ended and answered, or given back | 0 no longer the caller's (nothing done) | the
--   reply streams to use instead, apart by spaces (a repeat came or left; nothing done, call again with them).
--@include clock
--@include entries
--@include answer
--@include requeue

local consumer = ARGV[1]
local limits = {keep_ms = ARGV[2], reply_ttl_ms = ARGV[3], maxlen = ARGV[4]}
local results, k = {}, 1

-- Whether somebody waits still; then the others are told that it expired, and it goes back.
local function goes_on(keys, entry, id, attempt, result)
  local found = redis.call('XRANGE', keys.stream, entry, entry)[1]
  local known = on_any_type('HMGET', keys.req, 'emitted', 'cancel', 'until')
  if not found or not known then
    return false
  end
  local flat = found[2]
  local untils = words(known[3] or '')
  local waiting, lives, over = {}, {}, {}
  -- A worker counts its time from before the claim, so it may be early: only who waits longer than the entry counts.
  local past = math.max(clock_ms(), tonumber(field(flat, 'deadline_ms') or '') or 0)
  for i, reply in ipairs(keys.replies) do
    if (tonumber(untils[i] or '') or 0) > past then
      waiting[#waiting + 1], lives[#lives + 1] = reply, untils[i]
    else
      over[#over + 1] = reply
    end
  end
  if known[1] or known[2] or #waiting == 0 then
    return false
  end
  for _, reply in ipairs(over) do
    tell(keys.req, reply, limits, 'id', id, 'attempt', attempt, 'groups', '0', 'end', result)
  end
  redis.call('HSET', keys.req, 'reply', table.concat(waiting, ' '), 'until', table.concat(lives, ' '))
  keys.replies = waiting
  requeue(keys, entry, flat, tonumber(attempt))
  return true
end

for a = 4, #ARGV - 1, 6 do
  local keys = {req = KEYS[k], stream = KEYS[k + 1], replies = {}}
  for i = 1, tonumber(ARGV[a + 4]) do
    keys.replies[i] = KEYS[k + 1 + i]
  end
  k = k + 2 + #keys.replies
  local entry, id, attempt, result = ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 6]
  if not held_by(keys.stream, entry, consumer, 0) then
    results[#results + 1] = 0
  else
    local elsewhere, groups = moved(keys.req, keys.replies)
    if elsewhere then
      results[#results + 1] = elsewhere
    else
      if ARGV[a + 5] ~= '1' or not goes_on(keys, entry, id, attempt, result) then
        answer(keys, entry, id, attempt, result, limits, groups)
      end
      results[#results + 1] = 1
    end
  end
end
return results
