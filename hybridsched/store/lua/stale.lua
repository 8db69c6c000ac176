-- List claimed requests whose worker has not renewed them for a lease, for reclaim.lua. Changes no request;
-- forgets consumers that hold nothing and have long been silent. Requests that nobody holds and nobody will be
-- given (their consumer was deleted by hand, or the group was moved past them) are given to a consumer that never
-- lives, so that the next call lists them: they would wait for ever, and keep every lane of the model closed.
--
-- KEYS 1-3 streams of the model, most urgent first
-- ARGV 1 lease, ms (0: all claimed)   2 most to list in each class   3 silence after which an empty consumer is
--   forgotten, ms
-- Returns a list of {class, entry id, owner, idle_ms, flat fields}.
--@include entries

local NOBODY, LONG_MS = 'nobody:0', 86400000

local function find_orphans(stream)
  local lost = unclaimed(stream)
  if lost == 0 or head(stream) then
    return
  end
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    if lost > 0 and #redis.call('XPENDING', stream, GROUP, entry[1], entry[1], 1) == 0 then
      redis.call('XCLAIM', stream, GROUP, NOBODY, 0, entry[1], 'IDLE', LONG_MS, 'FORCE', 'JUSTID')
      lost = lost - 1
    end
  end
end

local found = {}
for class = 1, 3 do
  local stream = KEYS[class]
  local pending = redis.pcall('XPENDING', stream, GROUP, 'IDLE', ARGV[1], '-', '+', ARGV[2])
  if not pending.err then
    for _, row in ipairs(pending) do
      local entry = redis.call('XRANGE', stream, row[1], row[1])[1]
      if entry then
        found[#found + 1] = {class - 1, row[1], row[2], row[3], entry[2]}
      else
        redis.call('XACK', stream, GROUP, row[1])
      end
    end
    find_orphans(stream)
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
      if field(consumer, 'pending') == 0 and field(consumer, 'idle') > tonumber(ARGV[3]) then
        redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, field(consumer, 'name'))
      end
    end
  end
end
return found
