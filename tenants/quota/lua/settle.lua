-- Replaces a hold by what was used.
-- ARGV: now_us, epoch, request id, then what was used by meter

if is_lost() then
  return {'lost'}
end
local hold = find_hold(ARGV[3])
if not hold then
  return {'gone'}
end
local actual = by_meter(4)
local too_much = overrun(hold, actual)
if too_much then
  return too_much
end
finish(ARGV[3], hold, actual)
return {'settled'}
